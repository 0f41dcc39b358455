use super::*;
use shardlab_plan::ir::InstrId;

const SECOND: Duration = Duration::from_secs(1);

/// The first attempt of a process; another process has another instance.
fn first(instance: u64) -> Attempt {
    Attempt {
        instance,
        number: 1,
    }
}

fn three(now: Instant) -> State {
    let mut options = StoreOptions::new(3, "run", 10 * SECOND);
    options.grace = SECOND;
    let mut s = State::new(&options, now);
    for p in 0..3 {
        let place = format!("host, process {}", 100 + p);
        s.join(p, first(p.into()), &place, now).unwrap();
        // As a heart does at once.
        s.hear(p, beat(0, 0), now);
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
    Ask::Beat {
        progress,
        running,
        standing: Vec::new(),
    }
}

/// A rank's host stands at an instruction of its second pass.
fn stands(rank: u32, instr: u32) -> Ask {
    Ask::Beat {
        progress: 0,
        running: 0,
        standing: vec![Standing {
            rank,
            pass: 2,
            step: 1,
            instr: InstrId(instr),
            text: format!("op {instr}"),
        }],
    }
}

fn cause(s: &State) -> String {
    s.failure().map_or_else(String::new, |f| f.1)
}

#[test]
fn data_wait_for_readers_and_readers_for_data() {
    let now = Instant::now();
    let mut s = three(now);
    let get = |request| Ask::Get {
        request,
        key: "k".to_owned(),
        patient: false,
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
        "rank 2 did not reach `pass` and has not made progress for 14.0s"
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
    assert_eq!(
        cause(&s),
        "rank 1 did not reach `pass` and has not made progress for 100.0s"
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
    assert!(s.disconnected(1, first(1), at));
    assert!(s.tick(at).is_empty(), "whoever knows more may say so");
    let told = s.tick(at + SECOND);
    assert_eq!(told.len(), 3);
    assert_eq!(
        cause(&s),
        "rank 1 (host, process 101) died: its connection was closed"
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
        s.disconnected(p, first(p.into()), now);
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
        "rank 1 (host, process 101) has not responded for 10.0s"
    );

    let mut s = State::new(&StoreOptions::new(4, "run", 10 * SECOND), now);
    s.join(1, first(1), "host", now).unwrap();
    s.hear(1, beat(0, 0), now + 9 * SECOND);
    s.tick(now + 10 * SECOND);
    assert_eq!(cause(&s), "ranks 0, 2, 3 of 4 did not start within 10.0s");
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
    s.go_on(59 * SECOND, now + 60 * SECOND);
    assert!(s.tick(now + 69 * SECOND).is_empty());
    s.tick(now + 70 * SECOND);
    assert_eq!(
        cause(&s),
        "rank 0 (host, process 100) has not responded for 10.0s"
    );
}

#[test]
fn nobody_comes_twice() {
    let now = Instant::now();
    let mut s = three(now);
    let error = s.join(1, first(9), "elsewhere", now).unwrap_err();
    assert_eq!(
        error,
        "two processes claim to be rank 1: one on host, process 101, one on elsewhere"
    );
    let error = s.join(3, first(3), "", now).unwrap_err();
    assert_eq!(error, "there is no rank 3 of 3");
}

#[test]
fn a_stop_of_the_store_is_no_wait_of_others() {
    let start = Instant::now();
    let at = |seconds: u32| start + seconds * SECOND;
    // Of the start: 1 s before the stop of 11 s, so 9 s are left after it.
    let mut s = State::new(&StoreOptions::new(2, "run", 10 * SECOND), start);
    s.join(0, first(0), "host", start).unwrap();
    s.go_on(11 * SECOND, at(12));
    s.hear(0, beat(0, 0), at(20));
    assert!(s.tick(at(20)).is_empty());
    s.tick(at(21));
    assert_eq!(cause(&s), "rank 1 of 2 did not start within 10.0s");
    // Of keys and gatherings: 4 s before a stop of 60 s.
    let mut s = three(start);
    let get = |key: &str| Ask::Get {
        request: 3,
        key: key.to_owned(),
        patient: false,
    };
    s.hear(1, get("before"), start);
    s.hear(0, gather(6, false, false, 10), start);
    s.go_on(60 * SECOND, at(64));
    // What comes after the stop has its own time.
    s.hear(2, get("after"), at(64));
    let late = |told: Changes| -> Vec<String> {
        let why = |(_, tell)| match tell {
            Tell::Late { why, .. } => why,
            other => format!("{other:?}"),
        };
        told.into_iter().map(why).collect()
    };
    let mut tick = |seconds: u32| {
        (0..3).for_each(|p| drop(s.hear(p, beat(seconds.into(), 0), at(seconds))));
        late(s.tick(at(seconds)))
    };
    assert!(tick(69).is_empty());
    assert_eq!(tick(70), ["no rank published `before` within 10.0s"]);
    assert!(tick(73).is_empty());
    assert_eq!(tick(74), ["no rank published `after` within 10.0s"]);
}

/// Rank 0 chooses kernels, which may take longer than any step: it is waited for, and not for ever.
#[test]
fn a_patient_wait_is_longer() {
    let start = Instant::now();
    let mut s = three(start);
    let get = |key: &str, patient| Ask::Get {
        request: 3,
        key: key.to_owned(),
        patient,
    };
    s.hear(1, get("choice", true), start);
    s.hear(2, get("piece", false), start);
    let mut late = |seconds: u32| -> Vec<String> {
        let now = start + seconds * SECOND;
        (0..3).for_each(|p| drop(s.hear(p, beat(0, 0), now)));
        let words = s.tick(now).into_iter().map(|(_, tell)| format!("{tell:?}"));
        words.collect()
    };
    let told = late(10);
    assert!(told.len() == 1 && told[0].contains("no rank published `piece` within 10.0s"));
    assert!(late(99).is_empty());
    let told = late(100);
    assert!(told.len() == 1 && told[0].contains("no rank published `choice` within 100.0s"));
}

#[test]
fn an_attempt_that_was_given_up_is_no_death() {
    let now = Instant::now();
    let mut options = StoreOptions::new(2, "run", 10 * SECOND);
    options.grace = Duration::ZERO;
    let mut s = State::new(&options, now);
    let attempt = |number| Attempt {
        instance: 5,
        number,
    };
    let join = |s: &mut State, number| s.join(1, attempt(number), "host", now);
    s.join(0, first(0), "host", now).unwrap();
    // It ends before the next one comes, or after it has come.
    join(&mut s, 1).unwrap();
    assert!(s.disconnected(1, attempt(1), now));
    join(&mut s, 2).unwrap();
    join(&mut s, 3).unwrap();
    assert!(!s.disconnected(1, attempt(2), now));
    assert!(s.tick(now).is_empty());
    // They are read in any order.
    let error = join(&mut s, 2).unwrap_err();
    assert_eq!(error, "rank 1 has connected again since");
    // A process that has been let in is heard of, and may die.
    s.hear(1, beat(0, 0), now);
    assert!(s.disconnected(1, attempt(3), now));
    s.tick(now);
    assert_eq!(cause(&s), "rank 1 (host) died: its connection was closed");
}

#[test]
fn a_wait_in_vain_is_told_with_where_hosts_stand() {
    let now = Instant::now();
    let fail = |waited| Ask::Fail {
        cause: "rank 0: an event has not completed".to_owned(),
        waited,
    };
    let cause_of = |places: [u32; 3], waited| {
        let mut s = three(now);
        for (rank, at) in (0..).zip(places) {
            s.hear(rank, stands(rank, at), now);
        }
        s.hear(0, fail(waited), now);
        cause(&s).to_owned()
    };
    let said = "rank 0: an event has not completed";
    let places = "host positions, slowest first: rank 1 at instruction 796 `op 796`; ranks 0, 2 at instruction 1565 `op 1565`";
    assert_eq!(
        cause_of([1565, 796, 1565], true),
        format!("{said}; {places}")
    );
    assert_eq!(cause_of([1565, 796, 1565], false), said);
    assert_eq!(cause_of([796, 796, 796], true), said);

    // Nobody fails: one does not come.
    let mut s = three(now);
    for (rank, at) in [(0, 9), (1, 9), (2, 4)] {
        s.hear(rank, stands(rank, at), now);
    }
    s.hear(0, gather(1, false, true, 0), now);
    s.hear(1, gather(2, false, true, 0), now);
    let later = now + 10 * SECOND;
    for (rank, at) in [(0, 9), (1, 9), (2, 4)] {
        s.hear(rank, stands(rank, at), later);
    }
    s.tick(later);
    assert!(cause(&s).starts_with("rank 2 did not reach `pass` and has not made progress"));
    assert!(
        cause(&s).contains("first: rank 2 at instruction 4 `op 4`; ranks 0, 1 at"),
        "{}",
        cause(&s)
    );
}
