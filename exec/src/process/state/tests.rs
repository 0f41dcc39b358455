use super::*;
use shardlab_plan::ir::InstrId;

const SECOND: Duration = Duration::from_secs(1);

/// Returns the first attempt of a process. Another process has a different instance.
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
        let location = format!("host, process {}", 100 + p);
        s.join(p, first(p.into()), &location, now).unwrap();
        // A process sends a heartbeat immediately.
        s.handle(p, heartbeat(0, 0), now);
    }
    s
}

fn gather(request: u64, untimed: bool, to_all: bool, data: u8) -> Request {
    Request::Gather {
        request,
        key: "pass#7".to_owned(),
        mode: GatherMode { untimed, to_all },
        data: vec![data],
    }
}

fn heartbeat(progress: u64, running: u32) -> Request {
    Request::Heartbeat {
        progress,
        running,
        ranks: Vec::new(),
    }
}

/// Returns a heartbeat whose rank is at an instruction of its second pass.
fn at_instruction(rank: u32, instr: u32) -> Request {
    Request::Heartbeat {
        progress: 0,
        running: 0,
        ranks: vec![RankProgress {
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
fn data_and_readers_may_come_in_any_order() {
    let now = Instant::now();
    let mut s = three(now);
    let get = |request| Request::Get {
        request,
        key: "k".to_owned(),
        slow: false,
    };
    let put = |uses| Request::Put {
        key: "k".to_owned(),
        uses,
        data: vec![5],
    };
    assert!(s.handle(1, get(4), now).is_empty());
    let sent = s.handle(0, put(2), now);
    assert_eq!(sent, [(1, answer(4, vec![vec![5]]))]);
    assert_eq!(s.handle(2, get(0), now), [(2, answer(0, vec![vec![5]]))]);
    // Two processes have read it, so it is dropped.
    assert!(s.handle(2, get(1), now).is_empty());
    // It is not stored again, so the wait times out, and its process may continue.
    (0..3).for_each(|p| drop(s.handle(p, heartbeat(0, 0), now + 9 * SECOND)));
    let sent = s.tick(now + 10 * SECOND);
    assert_eq!(sent.len(), 1);
    assert!(matches!(&sent[0], (2, Response::TimedOut { request: 1, why }) if why.contains("`k`")));
    assert_eq!(s.failure(), None);
}

#[test]
fn a_gather_is_in_process_order_and_answers_its_receivers() {
    let now = Instant::now();
    let mut s = three(now);
    assert!(s.handle(2, gather(8, false, false, 12), now).is_empty());
    assert!(s.handle(0, gather(6, false, false, 10), now).is_empty());
    let sent = s.handle(1, gather(7, false, false, 11), now);
    let all = vec![vec![10], vec![11], vec![12]];
    assert_eq!(
        sent,
        [
            (0, answer(6, all)),
            (1, answer(7, vec![])),
            (2, answer(8, vec![]))
        ]
    );
}

#[test]
fn a_process_without_progress_is_named() {
    let now = Instant::now();
    let mut s = three(now);
    s.handle(0, gather(0, false, true, 0), now);
    let mut at = now;
    // Rank 1 makes progress, rank 2 is only alive.
    for i in 0..15 {
        at += SECOND;
        s.handle(0, heartbeat(0, 0), at);
        s.handle(1, heartbeat(i, 0), at);
        s.handle(2, heartbeat(7, 0), at);
        assert!(s.tick(at).is_empty(), "{i}");
    }
    s.handle(1, gather(0, false, true, 0), at);
    let sent = s.tick(at);
    assert_eq!(sent.len(), 3);
    assert_eq!(
        cause(&s),
        "rank 2 did not reach `pass` and has not made progress for 14.0s"
    );
}

#[test]
fn a_process_that_runs_kernels_gets_more_time() {
    let now = Instant::now();
    let mut s = three(now);
    s.handle(0, gather(0, false, true, 0), now);
    s.handle(2, gather(0, false, true, 0), now);
    for i in 1..=99 {
        let at = now + i * SECOND;
        for p in 0..3 {
            s.handle(p, heartbeat(0, u32::from(p == 1)), at);
        }
        assert!(s.tick(at).is_empty(), "{i}");
    }
    s.handle(0, heartbeat(0, 0), now + 100 * SECOND);
    s.handle(2, heartbeat(0, 0), now + 100 * SECOND);
    s.handle(1, heartbeat(0, 1), now + 100 * SECOND);
    s.tick(now + 100 * SECOND);
    assert_eq!(
        cause(&s),
        "rank 1 did not reach `pass` and has not made progress for 100.0s"
    );
}

#[test]
fn an_untimed_gather_ends_with_a_death() {
    let now = Instant::now();
    let mut s = three(now);
    s.handle(0, gather(0, true, true, 0), now);
    for i in 1..100 {
        let at = now + i * SECOND;
        (0..3).for_each(|p| drop(s.handle(p, heartbeat(0, 0), at)));
        assert!(s.tick(at).is_empty(), "{i}");
    }
    let at = now + 100 * SECOND;
    (0..3).for_each(|p| drop(s.handle(p, heartbeat(0, 0), at)));
    assert!(s.connection_lost(1, first(1), at));
    assert!(
        s.tick(at).is_empty(),
        "the launcher may report a more precise cause"
    );
    let sent = s.tick(at + SECOND);
    assert_eq!(sent.len(), 3);
    assert_eq!(
        cause(&s),
        "rank 1 (host, process 101) died: its connection was closed"
    );
    // The first cause counts, also for processes that join later.
    assert!(s.fail(2, "something else").is_empty());
    assert_eq!(s.known_failure(2).len(), 1);
}

#[test]
fn a_process_that_disconnects_is_not_lost() {
    let now = Instant::now();
    let mut s = three(now);
    for p in 0..3 {
        assert!(!s.is_over());
        s.handle(p, Request::Disconnect, now);
        s.connection_lost(p, first(p.into()), now);
    }
    assert!(s.is_over());
    assert!(s.tick(now + 1000 * SECOND).is_empty());
}

#[test]
fn silent_and_missing_processes_fail_the_run() {
    let now = Instant::now();
    let mut s = three(now);
    s.handle(0, heartbeat(0, 0), now + 9 * SECOND);
    s.handle(2, heartbeat(0, 0), now + 9 * SECOND);
    assert!(s.tick(now + 9 * SECOND).is_empty());
    s.tick(now + 10 * SECOND);
    assert_eq!(
        cause(&s),
        "rank 1 (host, process 101) has not responded for 10.0s"
    );

    let mut s = State::new(&StoreOptions::new(4, "run", 10 * SECOND), now);
    s.join(1, first(1), "host", now).unwrap();
    s.handle(1, heartbeat(0, 0), now + 9 * SECOND);
    s.tick(now + 10 * SECOND);
    assert_eq!(cause(&s), "ranks 0, 2, 3 of 4 did not start within 10.0s");
}

#[test]
fn heartbeats_are_answered() {
    let now = Instant::now();
    let mut s = three(now);
    assert_eq!(s.handle(1, heartbeat(3, 1), now), [(1, Response::Alive)]);
}

#[test]
fn a_suspension_of_the_store_is_not_silence_of_processes() {
    let now = Instant::now();
    let mut s = three(now);
    s.handle(0, gather(6, false, false, 10), now);
    s.resume(59 * SECOND, now + 60 * SECOND);
    assert!(s.tick(now + 69 * SECOND).is_empty());
    s.tick(now + 70 * SECOND);
    assert_eq!(
        cause(&s),
        "rank 0 (host, process 100) has not responded for 10.0s"
    );
}

#[test]
fn a_rank_joins_once() {
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
fn a_suspension_of_the_store_extends_waits() {
    let start = Instant::now();
    let at = |seconds: u32| start + seconds * SECOND;
    // At the start: 1 s before the suspension of 11 s, so 9 s remain after it.
    let mut s = State::new(&StoreOptions::new(2, "run", 10 * SECOND), start);
    s.join(0, first(0), "host", start).unwrap();
    s.resume(11 * SECOND, at(12));
    s.handle(0, heartbeat(0, 0), at(20));
    assert!(s.tick(at(20)).is_empty());
    s.tick(at(21));
    assert_eq!(cause(&s), "rank 1 of 2 did not start within 10.0s");
    // For keys and gathers: 4 s before a suspension of 60 s.
    let mut s = three(start);
    let get = |key: &str| Request::Get {
        request: 3,
        key: key.to_owned(),
        slow: false,
    };
    s.handle(1, get("before"), start);
    s.handle(0, gather(6, false, false, 10), start);
    s.resume(60 * SECOND, at(64));
    // A request after the suspension has a separate time.
    s.handle(2, get("after"), at(64));
    let late = |sent: Changes| -> Vec<String> {
        let why = |(_, response)| match response {
            Response::TimedOut { why, .. } => why,
            other => format!("{other:?}"),
        };
        sent.into_iter().map(why).collect()
    };
    let mut tick = |seconds: u32| {
        (0..3).for_each(|p| drop(s.handle(p, heartbeat(seconds.into(), 0), at(seconds))));
        late(s.tick(at(seconds)))
    };
    assert!(tick(69).is_empty());
    assert_eq!(tick(70), ["no rank published `before` within 10.0s"]);
    assert!(tick(73).is_empty());
    assert_eq!(tick(74), ["no rank published `after` within 10.0s"]);
}

/// Rank 0 autotunes kernels, which may take longer than any step. The wait is longer, but still
/// limited.
#[test]
fn a_slow_wait_is_longer() {
    let start = Instant::now();
    let mut s = three(start);
    let get = |key: &str, slow| Request::Get {
        request: 3,
        key: key.to_owned(),
        slow,
    };
    s.handle(1, get("choice", true), start);
    s.handle(2, get("piece", false), start);
    let mut late = |seconds: u32| -> Vec<String> {
        let now = start + seconds * SECOND;
        (0..3).for_each(|p| drop(s.handle(p, heartbeat(0, 0), now)));
        let words = s
            .tick(now)
            .into_iter()
            .map(|(_, response)| format!("{response:?}"));
        words.collect()
    };
    let sent = late(10);
    assert!(sent.len() == 1 && sent[0].contains("no rank published `piece` within 10.0s"));
    assert!(late(99).is_empty());
    let sent = late(100);
    assert!(sent.len() == 1 && sent[0].contains("no rank published `choice` within 100.0s"));
}

#[test]
fn an_abandoned_attempt_is_not_a_death() {
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
    // It ends before the next one joins, or afterwards.
    join(&mut s, 1).unwrap();
    assert!(s.connection_lost(1, attempt(1), now));
    join(&mut s, 2).unwrap();
    join(&mut s, 3).unwrap();
    assert!(!s.connection_lost(1, attempt(2), now));
    assert!(s.tick(now).is_empty());
    // Attempts are read in any order.
    let error = join(&mut s, 2).unwrap_err();
    assert_eq!(error, "rank 1 has connected again since");
    // A process that was admitted and is active can die.
    s.handle(1, heartbeat(0, 0), now);
    assert!(s.connection_lost(1, attempt(3), now));
    s.tick(now);
    assert_eq!(cause(&s), "rank 1 (host) died: its connection was closed");
}

#[test]
fn a_timeout_lists_host_positions() {
    let now = Instant::now();
    let fail = |timed_out| Request::Fail {
        cause: "rank 0: an event has not completed".to_owned(),
        timed_out,
    };
    let cause_of = |positions: [u32; 3], timed_out| {
        let mut s = three(now);
        for (rank, at) in (0..).zip(positions) {
            s.handle(rank, at_instruction(rank, at), now);
        }
        s.handle(0, fail(timed_out), now);
        cause(&s).to_owned()
    };
    let message = "rank 0: an event has not completed";
    let positions = "host positions, slowest first: rank 1 at instruction 796 `op 796`; ranks 0, 2 at instruction 1565 `op 1565`";
    assert_eq!(
        cause_of([1565, 796, 1565], true),
        format!("{message}; {positions}")
    );
    assert_eq!(cause_of([1565, 796, 1565], false), message);
    assert_eq!(cause_of([796, 796, 796], true), message);

    // No process fails, but one does not arrive.
    let mut s = three(now);
    for (rank, at) in [(0, 9), (1, 9), (2, 4)] {
        s.handle(rank, at_instruction(rank, at), now);
    }
    s.handle(0, gather(1, false, true, 0), now);
    s.handle(1, gather(2, false, true, 0), now);
    let later = now + 10 * SECOND;
    for (rank, at) in [(0, 9), (1, 9), (2, 4)] {
        s.handle(rank, at_instruction(rank, at), later);
    }
    s.tick(later);
    assert!(cause(&s).starts_with("rank 2 did not reach `pass` and has not made progress"));
    assert!(
        cause(&s).contains("first: rank 2 at instruction 4 `op 4`; ranks 0, 1 at"),
        "{}",
        cause(&s)
    );
}
