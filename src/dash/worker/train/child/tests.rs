//! Tests with shell scripts in place of the training process. They check the reports of the
//! process, its end, and that no process remains.

use super::*;
use crate::dash::event::{Event as DashEvent, Message};
use std::sync::mpsc::Sender;

const BEGUN: &str =
    r#"echo '{"event":"begun","ranks":2,"device":"NVIDIA H200","resumed_from":0,"steps":6}' >&2;"#;

/// Follows a script. `act` receives every report and may stop the script. Returns the result and
/// the reports.
fn follow(
    script: &str,
    patience: Duration,
    act: impl Fn(&News, &Stop) + Send,
) -> (Result<Report, String>, Vec<News>, Stop) {
    let (events, inbox): (Sender<DashEvent>, _) = channel();
    let reporter = Reporter { id: 1, events };
    let stop = Stop::default();
    let (result, news) = std::thread::scope(|scope| {
        let stop = &stop;
        let watcher = scope.spawn(move || {
            let mut all = Vec::new();
            for event in inbox {
                let DashEvent::Message(Message::Job(1, news)) = event else {
                    panic!("{event:?} is no news of the job");
                };
                act(&news, stop);
                all.push(news);
            }
            all
        });
        let watch = Watch {
            counted_in: BatchUnit::Tokens,
            place: &|name| format!("2 x {name}"),
            patience,
            reporter: &reporter,
            stop,
        };
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        let result = watch.follow(command);
        drop(reporter);
        (result, watcher.join().unwrap())
    });
    (result, news, stop)
}

fn calm(script: &str) -> (Result<Report, String>, Vec<News>, Stop) {
    follow(script, Duration::from_secs(60), |_, _| {})
}

/// Returns whether a process is running.
fn runs(process: &str) -> bool {
    Path::new("/proc").join(process).exists()
}

#[test]
fn what_it_says_becomes_news() {
    let script = format!(
        r#"{BEGUN} cat >&2 <<'END'
{{"event":"step","step":1,"steps":6,"loss":2.5,"grad_norm":null,"lr":0.5,"time_ns":3000000,"tokens":64,"ranks":[{{"time_ns":3000000,"host_ns":1000000,"peak_allocated_bytes":7,"peak_reserved_bytes":8}}]}}
NCCL WARN something

{{"event":"validation","step":1,"loss":2.25}}
{{"event":"note","text":"slow disk"}}
{{"event":"end","step":1,"interrupted":false,"run_id":"x-1"}}
END"#
    );
    let (report, news, stop) = calm(&script);
    let report = report.unwrap();
    let seen: Vec<String> = news
        .iter()
        .map(|n| match n {
            News::On(place) => format!("on {place}"),
            News::Stepping => "stepping".to_owned(),
            News::Step(s) => {
                assert!(s.grad_norm.is_none());
                assert_eq!((s.loss, s.lr, s.tokens), (2.5, 0.5, 64));
                assert_eq!(s.time, Duration::from_millis(3));
                let rank = RankStep {
                    time: Duration::from_millis(3),
                    host: Duration::from_millis(1),
                    allocated: 7,
                    reserved: 8,
                };
                assert_eq!(s.ranks, [rank]);
                format!("step {} of {}", s.step, s.steps)
            }
            News::Validation(step, loss) => format!("validation {step} {loss}"),
            News::Note(text) => format!("note {text}"),
            other => format!("{other:?}"),
        })
        .collect();
    let wanted = [
        "on 2 x NVIDIA H200",
        "stepping",
        "step 1 of 6",
        "note NCCL WARN something",
        "validation 1 2.25",
        "note slow disk",
    ];
    assert_eq!(seen, wanted);
    assert_eq!(report.over.as_ref().unwrap().run_id.as_deref(), Some("x-1"));
    assert!(matches!(report.result(true, &stop), Ok(Ended::Done)));
}

#[test]
fn a_dead_process_is_reported_with_its_last_output() {
    let (report, _, stop) = calm("echo first >&2; echo 'cannot continue' >&2; exit 7");
    let Err(reason) = report.unwrap().result(true, &stop) else {
        panic!("it failed");
    };
    let wanted = "the training's process ended with exit status 7\nfirst\ncannot continue\nX trains it on the CPU";
    assert_eq!(reason, wanted);
    // If training has started, or if it is on the CPU, another device would not help.
    let (report, _, stop) = calm(&format!("{BEGUN} kill -9 $$"));
    let reason = report.unwrap().result(true, &stop).err().unwrap();
    assert!(
        reason.starts_with("the training's process was killed (signal 9"),
        "{reason}"
    );
    assert!(!reason.contains("CPU"), "{reason}");
    let error = r#"{"event":"error","text":"too few\n  GPUs"}"#;
    let (report, _, stop) = calm(&format!("cat >&2 <<'END'\n{error}\nnoise\nEND\nexit 3"));
    let reason = report.unwrap().result(false, &stop).err().unwrap();
    assert_eq!(reason, "too few\n  GPUs");
}

#[test]
fn a_program_that_is_not_there() {
    let (events, _inbox) = channel();
    let watch = Watch {
        counted_in: BatchUnit::Tokens,
        place: &str::to_owned,
        patience: Duration::from_secs(60),
        reporter: &Reporter { id: 1, events },
        stop: &Stop::default(),
    };
    let reason = watch.follow(Command::new("/no/such/program")).unwrap_err();
    assert!(reason.starts_with("cannot start training: "), "{reason}");
}

/// Children inherit ignored signals, which `sh` cannot trap; handled signals are reset to their
/// default. Scripts that start tests with `&` ignore SIGINT.
fn children_hear_interrupts() {
    use signal_hook::{consts::SIGINT, flag};
    use std::sync::{Arc, atomic::AtomicBool};
    // A second signal ends the tests, as it would without a handler.
    flag::register_conditional_shutdown(SIGINT, 130, Arc::new(AtomicBool::new(true))).unwrap();
}

/// The child is stopped by a single SIGINT, and its result is used.
#[test]
fn it_is_stopped_in_good_order() {
    children_hear_interrupts();
    let end = r#"{"event":"end","step":3,"interrupted":true,"run_id":null}"#;
    let script = format!(
        "trap \"echo '{}' >&2; exit 3\" INT; {BEGUN} while :; do sleep 0.02; done",
        end.replace('"', "\\\"")
    );
    let (report, _, stop) = follow(&script, Duration::from_secs(60), |news, stop| {
        if matches!(news, News::Stepping) {
            stop.ask();
        }
    });
    assert!(matches!(
        report.unwrap().result(true, &stop),
        Ok(Ended::Cancelled)
    ));
    // A child that is stopped before it could listen has no result, which is not a failure.
    let report = Report::default();
    assert!(matches!(report.result(true, &stop), Ok(Ended::Cancelled)));
}

#[test]
fn one_that_does_not_listen_is_killed() {
    let script = format!("trap '' INT; {BEGUN} echo $$ >&2; exec sleep 600");
    let (report, news, _) = follow(&script, Duration::from_millis(300), |news, stop| {
        if matches!(news, News::Note(_)) {
            stop.ask();
        }
    });
    let reason = report.unwrap_err();
    assert!(reason.ends_with("and was killed"), "{reason}");
    let Some(News::Note(process)) = news.last() else {
        panic!("{news:?}");
    };
    assert!(!runs(process));
}

/// When the dashboard quits, it ends the child and waits for it.
#[test]
fn none_is_left_behind() {
    let children = Children::default();
    std::thread::scope(|scope| {
        let counted = children.clone();
        let (said, heard) = channel();
        let job = scope.spawn(move || {
            let _counted = counted;
            let script = "echo $$ >&2; exec sleep 600";
            follow(script, Duration::from_secs(60), move |news, stop| {
                if let News::Note(process) = news {
                    said.send((process.clone(), stop.clone())).unwrap();
                }
            })
        });
        let (process, stop) = heard.recv().unwrap();
        // It waits while the child runs.
        children.wait(Duration::from_millis(50));
        assert!(runs(&process));
        stop.leave();
        children.wait(Duration::from_secs(60));
        assert!(!runs(&process));
        let (report, ..) = job.join().unwrap();
        assert_eq!(report.unwrap().status, None);
    });
}
