use super::*;

fn shell(script: &str, ranks: u32) -> Launch {
    Launch {
        ranks,
        program: "/bin/sh".into(),
        args: vec!["-c".into(), script.into()],
        timeout: Duration::from_secs(60),
        farewell: Duration::from_millis(200),
    }
}

const NOTHING: Asked<'_> = Asked {
    interrupted: &|| false,
    stopped: &|| false,
};

#[test]
fn ranks_know_their_place() {
    let script = r#"test "$SHARDLAB_WORLD_SIZE" = 3 && test -n "$SHARDLAB_MEETING" && exit "$SHARDLAB_RANK""#;
    let mut what = shell(script, 3);
    what.farewell = Duration::from_secs(60);
    let ended = launch(&what, NOTHING).unwrap();
    assert_eq!(ended.status, [0, 1, 2]);
    assert!(!ended.is_good());
}

#[test]
fn nobody_is_left() {
    // Ranks that never come to the start, and do not listen.
    let mut what = shell("trap '' TERM INT; exec sleep 600", 2);
    what.timeout = Duration::from_millis(300);
    let ended = launch(&what, NOTHING).unwrap();
    assert_eq!(ended.status, [-9, -9]);
    let (_, cause) = ended.failure.unwrap();
    assert!(cause.contains("ranks 0, 1 of 2 did not start"), "{cause}");
    // One that fails takes the other with it.
    let script = r#"test "$SHARDLAB_RANK" = 0 && exec sleep 600; exit 7"#;
    let ended = launch(&shell(script, 2), NOTHING).unwrap();
    assert_eq!(ended.status, [-9, 7]);
    assert_eq!(ended.first(), Some((1, 7)));
    assert_eq!(ended.failure.unwrap().1, "rank 1 ended with exit status 7");
}

/// What a process has ignored its children ignore, and `sh` cannot trap; what it handles they have the usual way again. Scripts that
/// start tests with `&` have SIGINT ignored.
fn children_hear_interrupts() {
    use signal_hook::{consts::SIGINT, flag};
    use std::sync::{Arc, atomic::AtomicBool};
    // It ends the tests, as without a handler.
    flag::register_conditional_shutdown(SIGINT, 130, Arc::new(AtomicBool::new(true))).unwrap();
}

#[test]
fn rank_0_is_told_of_an_interruption() {
    children_hear_interrupts();
    let script =
        r#"test "$SHARDLAB_RANK" = 0 || exit 0; trap 'exit 5' INT; while :; do sleep 0.02; done"#;
    let asked = Asked {
        interrupted: &|| true,
        ..NOTHING
    };
    let ended = launch(&shell(script, 2), asked).unwrap();
    // The signal may come before the shell has set its trap.
    assert!(matches!(ended.status[..], [5 | -2, 0]), "{ended:?}");
}

#[test]
fn a_program_that_is_not_there() {
    let mut what = shell("", 2);
    what.program = "/no/such/program".into();
    assert!(launch(&what, NOTHING).is_err());
}

#[test]
fn a_rank_that_was_killed_is_told_of_though_another_said_something_else_first() {
    // Rank 0 notices that its peer is gone, and fails, before the launcher looks.
    let script = r#"if test "$SHARDLAB_RANK" = 1; then kill -9 $$; fi; exit 3"#;
    let ended = launch(&shell(script, 2), NOTHING).unwrap();
    assert_eq!(ended.status, [3, -9]);
    let struck = (
        1,
        "was killed (signal 9: by a user, or because the host ran out of memory)".to_owned(),
    );
    assert_eq!(ended.struck, std::slice::from_ref(&struck));
    let said = |cause: &str| Ended {
        failure: Some((0, cause.to_owned())),
        ..ended.clone()
    };
    let peer = said("rank 0: connection closed by a peer");
    assert_eq!(peer.unsaid().collect::<Vec<_>>(), [&struck]);
    let known = said(&format!("rank 1 {}", struck.1));
    assert_eq!(known.unsaid().count(), 0);
    // Those whom the launcher ends are not told of.
    let mut late = shell("trap '' TERM INT; exec sleep 600", 2);
    late.timeout = Duration::from_millis(300);
    assert_eq!(launch(&late, NOTHING).unwrap().struck, []);
}
