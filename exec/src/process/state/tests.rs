use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn three(now: Instant) -> State {
    let mut options = StoreOptions::new(3, "run", 10 * SECOND);
    options.grace = SECOND;
    let mut s = State::new(&options, now);
    for p in 0..3 {
        s.join(p, &format!("host, process {}", 100 + p), now)
            .unwrap();
    }
    s
}

fn gather(request: u64, patient: bool, all: bool, data: u8) -> Ask {
    Ask::Gather {
        request,
        key: "pass#7".to_owned(),
        mode: Mode { patient, all },
        data: vec![data],
    }
}

fn beat(progress: u64, running: u32) -> Ask {
    Ask::Beat { progress, running }
}

fn cause(s: &State) -> &str {
    s.failure().map_or("", |f| f.1.as_str())
}

#[test]
fn data_wait_for_readers_and_readers_for_data() {
    let now = Instant::now();
    let mut s = three(now);
    let get = |request| Ask::Get {
        request,
        key: "k".to_owned(),
    };
    let put = |uses| Ask::Put {
        key: "k".to_owned(),
        uses,
        data: vec![5],
    };
    assert!(s.hear(1, get(4), now).is_empty());
    let told = s.hear(0, put(2), now);
    assert_eq!(told, [(1, answer(4, vec![vec![5]]))]);
    assert_eq!(s.hear(2, get(0), now), [(2, answer(0, vec![vec![5]]))]);
    // Two have read it: it is forgotten.
    assert!(s.hear(2, get(1), now).is_empty());
    // Nobody leaves it: the one who waits hears so, and may go on.
    (0..3).for_each(|p| drop(s.hear(p, beat(0, 0), now + 9 * SECOND)));
    let told = s.tick(now + 10 * SECOND);
    assert_eq!(told.len(), 1);
    assert!(matches!(&told[0], (2, Tell::Late { request: 1, why }) if why.contains("`k`")));
    assert_eq!(s.failure(), None);
}

#[test]
fn a_gathering_is_by_process_and_for_whom_it_is() {
    let now = Instant::now();
    let mut s = three(now);
    assert!(s.hear(2, gather(8, false, false, 12), now).is_empty());
    assert!(s.hear(0, gather(6, false, false, 10), now).is_empty());
    let told = s.hear(1, gather(7, false, false, 11), now);
    let all = vec![vec![10], vec![11], vec![12]];
    assert_eq!(
        told,
        [
            (0, answer(6, all)),
            (1, answer(7, vec![])),
            (2, answer(8, vec![]))
        ]
    );
}

#[test]
fn whoever_does_not_move_is_named() {
    let now = Instant::now();
    let mut s = three(now);
    s.hear(0, gather(0, false, true, 0), now);
    let mut at = now;
    // Rank 1 moves, rank 2 only lives.
    for i in 0..15 {
        at += SECOND;
        s.hear(0, beat(0, 0), at);
        s.hear(1, beat(i, 0), at);
        s.hear(2, beat(7, 0), at);
        assert!(s.tick(at).is_empty(), "{i}");
    }
    s.hear(1, gather(0, false, true, 0), at);
    let told = s.tick(at);
    assert_eq!(told.len(), 3);
    assert_eq!(
        cause(&s),
        "rank 2 did not come to `pass` and has not moved for 10.0s"
    );
}

#[test]
fn whoever_computes_is_waited_for() {
    let now = Instant::now();
    let mut s = three(now);
    s.hear(0, gather(0, false, true, 0), now);
    s.hear(2, gather(0, false, true, 0), now);
    for i in 1..=99 {
        let at = now + i * SECOND;
        for p in 0..3 {
            s.hear(p, beat(0, u32::from(p == 1)), at);
        }
        assert!(s.tick(at).is_empty(), "{i}");
    }
    s.hear(0, beat(0, 0), now + 100 * SECOND);
    s.hear(2, beat(0, 0), now + 100 * SECOND);
    s.hear(1, beat(0, 1), now + 100 * SECOND);
    s.tick(now + 100 * SECOND);
    assert!(
        cause(&s).starts_with("rank 1 did not come"),
        "{}",
        cause(&s)
    );
}

#[test]
fn patience_ends_with_a_life() {
    let now = Instant::now();
    let mut s = three(now);
    s.hear(0, gather(0, true, true, 0), now);
    for i in 1..100 {
        let at = now + i * SECOND;
        (0..3).for_each(|p| drop(s.hear(p, beat(0, 0), at)));
        assert!(s.tick(at).is_empty(), "{i}");
    }
    let at = now + 100 * SECOND;
    (0..3).for_each(|p| drop(s.hear(p, beat(0, 0), at)));
    s.disconnected(1, at);
    assert!(s.tick(at).is_empty(), "whoever knows more may say so");
    let told = s.tick(at + SECOND);
    assert_eq!(told.len(), 3);
    assert_eq!(
        cause(&s),
        "rank 1 (host, process 101) has died: its connection ended"
    );
    // The first cause is the one that counts, also for those who come later.
    assert!(s.fail(2, "something else").is_empty());
    assert_eq!(s.welcome(2).len(), 1);
}

#[test]
fn whoever_says_goodbye_is_not_lost() {
    let now = Instant::now();
    let mut s = three(now);
    for p in 0..3 {
        assert!(!s.is_over());
        s.hear(p, Ask::Bye, now);
        s.disconnected(p, now);
    }
    assert!(s.is_over());
    assert!(s.tick(now + 1000 * SECOND).is_empty());
}

#[test]
fn the_silent_and_the_missing() {
    let now = Instant::now();
    let mut s = three(now);
    s.hear(0, beat(0, 0), now + 9 * SECOND);
    s.hear(2, beat(0, 0), now + 9 * SECOND);
    assert!(s.tick(now + 9 * SECOND).is_empty());
    s.tick(now + 10 * SECOND);
    assert_eq!(
        cause(&s),
        "rank 1 (host, process 101) has been silent for 10.0s"
    );

    let mut s = State::new(&StoreOptions::new(4, "run", 10 * SECOND), now);
    s.join(1, "host", now).unwrap();
    s.hear(1, beat(0, 0), now + 9 * SECOND);
    s.tick(now + 10 * SECOND);
    assert_eq!(
        cause(&s),
        "ranks 0, 2, 3 of 4 did not come to the start within 10.0s"
    );
}

#[test]
fn beats_are_answered() {
    let now = Instant::now();
    let mut s = three(now);
    assert_eq!(s.hear(1, beat(3, 1), now), [(1, Tell::Alive)]);
}

#[test]
fn a_store_that_was_stopped_itself_blames_nobody() {
    let now = Instant::now();
    let mut s = three(now);
    s.hear(0, gather(6, false, false, 10), now);
    s.go_on(now + 60 * SECOND);
    assert!(s.tick(now + 69 * SECOND).is_empty());
    s.tick(now + 70 * SECOND);
    assert_eq!(
        cause(&s),
        "rank 0 (host, process 100) has been silent for 10.0s"
    );
}

#[test]
fn nobody_comes_twice() {
    let now = Instant::now();
    let mut s = three(now);
    let error = s.join(1, "elsewhere", now).unwrap_err();
    assert_eq!(
        error,
        "two processes say that they are rank 1: one on host, process 101, one on elsewhere"
    );
    assert_eq!(s.join(3, "", now).unwrap_err(), "there is no rank 3 of 3");
}
