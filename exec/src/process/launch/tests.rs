use super::*;

fn shell(script: &str, ranks: u32) -> Launch {
    Launch {
        ranks,
        program: "/bin/sh".into(),
        args: vec!["-c".into(), script.into()],
        timeout: Duration::from_secs(60),
        shutdown_grace: Duration::from_millis(200),
    }
}

const NO_SIGNALS: ControlSignals<'_> = ControlSignals {
    interrupted: &|| false,
    suspended: &|| false,
};

#[test]
fn ranks_get_their_environment() {
    let script = r#"test "$SHARDLAB_WORLD_SIZE" = 3 && test -n "$SHARDLAB_MEETING" && exit "$SHARDLAB_RANK""#;
    let mut what = shell(script, 3);
    what.shutdown_grace = Duration::from_secs(60);
    let outcome = launch(&what, NO_SIGNALS).unwrap();
    assert_eq!(outcome.status, [0, 1, 2]);
}

#[test]
fn no_process_is_left_behind() {
    // Ranks that never join, and ignore signals.
    let mut what = shell("trap '' TERM INT; exec sleep 600", 2);
    what.timeout = Duration::from_millis(300);
    let outcome = launch(&what, NO_SIGNALS).unwrap();
    assert_eq!(outcome.status, [-9, -9]);
    let (_, cause) = outcome.failure.unwrap();
    assert!(cause.contains("ranks 0, 1 of 2 did not start"), "{cause}");
    // If one fails, the other is killed.
    let script = r#"test "$SHARDLAB_RANK" = 0 && exec sleep 600; exit 7"#;
    let outcome = launch(&shell(script, 2), NO_SIGNALS).unwrap();
    assert_eq!(outcome.status, [-9, 7]);
    assert_eq!(outcome.first(), Some((1, 7)));
    assert_eq!(
        outcome.failure.unwrap().1,
        "rank 1 ended with exit status 7"
    );
}

/// Makes children receive SIGINT. Children inherit ignored signals, which `sh` cannot trap, and
/// scripts that start tests with `&` ignore SIGINT. Handled signals are reset to the default.
fn restore_interrupts() {
    use signal_hook::{consts::SIGINT, flag};
    use std::sync::{Arc, atomic::AtomicBool};
    // A second signal ends the tests, as it would without a handler.
    flag::register_conditional_shutdown(SIGINT, 130, Arc::new(AtomicBool::new(true))).unwrap();
}

#[test]
fn rank_0_receives_interrupts() {
    restore_interrupts();
    let script =
        r#"test "$SHARDLAB_RANK" = 0 || exit 0; trap 'exit 5' INT; while :; do sleep 0.02; done"#;
    let signals = ControlSignals {
        interrupted: &|| true,
        ..NO_SIGNALS
    };
    let outcome = launch(&shell(script, 2), signals).unwrap();
    // The signal may arrive before the shell has set its trap.
    assert!(matches!(outcome.status[..], [5 | -2, 0]), "{outcome:?}");
}

#[test]
fn a_program_that_is_not_there() {
    let mut what = shell("", 2);
    what.program = "/no/such/program".into();
    assert!(launch(&what, NO_SIGNALS).is_err());
}

#[test]
fn a_killed_rank_is_reported_although_another_failure_came_first() {
    // Rank 0 notices that its peer no longer exists, and fails, before the launcher checks.
    let script = r#"if test "$SHARDLAB_RANK" = 1; then kill -9 $$; fi; exit 3"#;
    let outcome = launch(&shell(script, 2), NO_SIGNALS).unwrap();
    assert_eq!(outcome.status, [3, -9]);
    let killed = (
        1,
        "was killed (signal 9: by a user, or because the host ran out of memory)".to_owned(),
    );
    assert_eq!(outcome.killed, std::slice::from_ref(&killed));
    let failed_with = |cause: &str| LaunchOutcome {
        failure: Some((0, cause.to_owned())),
        ..outcome.clone()
    };
    let peer = failed_with("rank 0: connection closed by a peer");
    assert_eq!(peer.unreported_kills().collect::<Vec<_>>(), [&killed]);
    let known = failed_with(&format!("rank 1 {}", killed.1));
    assert_eq!(known.unreported_kills().count(), 0);
    // Ranks that the launcher kills are not reported.
    let mut late = shell("trap '' TERM INT; exec sleep 600", 2);
    late.timeout = Duration::from_millis(300);
    assert_eq!(launch(&late, NO_SIGNALS).unwrap().killed, []);
}
