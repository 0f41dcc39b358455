//! Scripts of events: the resulting state, and the requested effects.

use crate::dash::app::{App, Purpose, View};
use crate::dash::event::{Effect, Event, Message, News, Setup, StoredRun, Task};
use crate::dash::glance::Brief;
use crate::dash::judge;
use crate::dash::lanes::Lanes;
use crate::dash::scenarios::{Pane, Source, tell_kept};
use crate::dash::state::Saved;
use crate::dash::sweep::SweepView;
use crate::dash::testing::{Stage, brief, explained, glance, step, tuned};
use crate::dash::theme::{Depth, Name, Theme};
use ratatui::crossterm::event::{KeyModifiers, MouseButton, MouseEvent, MouseEventKind};
use shardlab_plan::record::RunKind;
use shardlab_plan::scenario::sweep_of;
use shardlab_plan::units::Bytes;
use shardlab_reports::store::Store;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

fn last_prediction(stage: &Stage) -> (u64, Vec<String>) {
    let found = stage.effects.iter().rev().find_map(|e| match e {
        Effect::Predict { ticket, setup } => Some((*ticket, setup.overrides.clone())),
        _ => None,
    });
    found.expect("a prediction was asked for")
}

fn started(stage: &Stage) -> Vec<&Task> {
    stage
        .effects
        .iter()
        .filter_map(|e| match e {
            Effect::Start(_, task) => Some(task),
            _ => None,
        })
        .collect()
}

#[test]
fn the_begin_asks_for_a_prediction_numbers_and_the_store() {
    let stage = Stage::new();
    assert!(
        stage
            .effects
            .iter()
            .any(|e| matches!(e, Effect::Survey(setups) if setups.len() == 5))
    );
    assert_eq!(last_prediction(&stage), (1, Vec::new()));
    assert_eq!(started(&stage), [&Task::ListStore]);
}

#[test]
fn editing_predicts_with_every_key_and_cancelling_goes_back() {
    let mut stage = Stage::new();
    stage.keys("<tab>/prefetch_f<enter><enter><backspace>2");
    let (ticket, set) = last_prediction(&stage);
    assert_eq!(set, ["fsdp.prefetch_forward=2"]);
    // The empty text in between is not a value. It was also requested, and its answer arrives late.
    stage.tell(Message::Predicted {
        ticket: ticket - 1,
        base: None,
        now: Err("late".into()),
    });
    assert_eq!(stage.app.scenarios.error, None);
    assert!(stage.app.scenarios.pending);
    stage.keys("<esc>");
    assert_eq!(last_prediction(&stage).1, Vec::<String>::new());
    assert_eq!(stage.app.scenarios.changes(), None);
    stage.keys("<enter><ctrl-u>2<enter>");
    assert_eq!(last_prediction(&stage).1, ["fsdp.prefetch_forward=2"]);
    assert_eq!(stage.app.scenarios.changes().map(BTreeMap::len), Some(1));
    // The scenario's own value is not a change.
    stage.predicted(1000.0);
    stage.keys("<left>");
    assert_eq!(stage.app.scenarios.changes(), None);
    stage.keys("<right><right>d");
    assert_eq!(stage.app.scenarios.changes(), None);
}

fn refuse(stage: &mut Stage, reason: &str) {
    stage.tell(Message::Predicted {
        ticket: stage.app.scenarios.ticket,
        base: stage.app.scenarios.base.clone(),
        now: Err(reason.into()),
    });
}

fn changes(stage: &Stage) -> Vec<String> {
    stage.app.setup().unwrap().overrides
}

#[test]
fn a_value_that_cannot_be_is_shown_but_not_in_force() {
    let mut stage = Stage::new();
    stage.keys("<tab>/prefetch_<enter><enter><ctrl-u>2<enter>");
    stage.predicted(1000.0);
    let good = ["fsdp.prefetch_forward=2"];
    assert_eq!(changes(&stage), good);
    // The value is accepted before it is known to be invalid.
    stage.keys("<enter><ctrl-u>no<enter>");
    assert_eq!(changes(&stage), ["fsdp.prefetch_forward=no"]);
    refuse(&mut stage, "not an integer");
    assert_eq!(changes(&stage), good);
    assert_eq!(last_prediction(&stage).1, good);
    stage.predicted(1000.0);
    assert!(stage.screen(120, 40).contains("not an integer"));
    // It affects neither started jobs nor the next option.
    stage.keys("r1<down><right>");
    assert_eq!(
        changes(&stage),
        ["fsdp.prefetch_backward=2", "fsdp.prefetch_forward=2"]
    );
    stage.predicted(990.0);
    assert!(!stage.screen(120, 40).contains("not an integer"));
    // The value is known to be invalid while it is typed, so Enter rejects it and Esc discards it.
    stage.keys("<enter><ctrl-u>x");
    refuse(&mut stage, "no x");
    stage.keys("<enter>");
    assert_eq!(
        changes(&stage),
        ["fsdp.prefetch_backward=2", "fsdp.prefetch_forward=2"]
    );
    stage.predicted(990.0);
    assert!(stage.screen(120, 40).contains("(not x; Esc)"));
    stage.keys("<esc>");
    assert_eq!(stage.app.scenarios.pane, Pane::Options);
    assert!(!stage.screen(120, 40).contains("no x"));
    stage.keys("<esc>");
    assert_eq!(stage.app.scenarios.pane, Pane::List);
    // Only valid changes are saved for the next session.
    assert_eq!(
        stage.app.save().overrides["llama-tiny"].len(),
        2,
        "{:?}",
        stage.app.save().overrides
    );
}

#[test]
fn arrows_pass_by_values_that_cannot_be() {
    let mut stage = Stage::new();
    stage.keys("<tab>/fsdp.policy<enter>");
    assert_eq!(changes(&stage), Vec::<String>::new());
    stage.keys("<right>");
    refuse(&mut stage, "fsdp2 cannot");
    stage.predicted(1000.0);
    assert_eq!(changes(&stage), Vec::<String>::new());
    stage.keys("<right>");
    assert_eq!(changes(&stage), ["fsdp.policy=megatron"]);
    // Without a value there is no change.
    stage.predicted(1000.0);
    stage.keys("<enter><ctrl-u>");
    assert_eq!(last_prediction(&stage).1, Vec::<String>::new());
    stage.keys("<enter>");
    assert_eq!(changes(&stage), Vec::<String>::new());
}

/// If changes of the last session are no longer valid, there is no valid state to return to. They
/// are reported and can be undone.
#[test]
fn invalid_kept_changes_are_reported() {
    let mut saved = Saved::default();
    let change = [("fsdp.policy".to_owned(), "gone".to_owned())].into();
    saved.overrides = [("llama-tiny".to_owned(), change)].into();
    let (mut app, _) = crate::dash::app::App::new(
        Stage::new().app.scenarios.sources,
        crate::dash::theme::Theme::new(
            crate::dash::theme::Name::Dark,
            crate::dash::theme::Depth::True,
        ),
        &saved,
    );
    app.size = (120, 40);
    let mut stage = Stage {
        app,
        effects: Vec::new(),
    };
    refuse(&mut stage, "no policy gone");
    assert_eq!(changes(&stage), ["fsdp.policy=gone"]);
    assert!(stage.screen(120, 40).contains("no policy gone"));
    // Another value is not the cause and is accepted, so several errors can be corrected one after
    // another.
    stage.keys("<tab>/prefetch_f<enter><enter><ctrl-u>2");
    refuse(&mut stage, "no policy gone");
    assert_eq!(stage.app.scenarios.refused, None);
    stage.keys("<enter>");
    refuse(&mut stage, "no policy gone");
    assert_eq!(
        changes(&stage),
        ["fsdp.policy=gone", "fsdp.prefetch_forward=2"]
    );
    stage.keys("D");
    assert_eq!(last_prediction(&stage).1, Vec::<String>::new());
}

#[test]
fn completion_goes_round() {
    let mut stage = Stage::new();
    stage.keys("<tab>/policy<enter><enter>");
    let text = |stage: &Stage| stage.app.prompt.as_ref().map(|p| p.line.text().to_owned());
    let mut seen = Vec::new();
    for _ in 0..5 {
        stage.keys("<tab>");
        seen.extend(text(&stage));
    }
    assert_eq!(
        seen,
        ["native", "fsdp2", "megatron", "megatron_v2", "native"]
    );
    stage.keys("<up><up><enter>");
    assert_eq!(last_prediction(&stage).1, ["fsdp.policy=megatron"]);
}

#[test]
fn the_filter_keeps_the_selection_and_finds_by_numbers() {
    let mut stage = Stage::new();
    stage.keys("jj/step>1000");
    let names = |stage: &Stage| -> Vec<String> {
        let s = &stage.app.scenarios;
        s.rows()
            .iter()
            .map(|&i| s.sources[i].name.clone())
            .collect()
    };
    assert_eq!(
        names(&stage),
        ["llama3-70b-64xh100", "llama3-8b-4xh200", "prefetch-0"]
    );
    assert_eq!(
        stage.app.scenarios.current().map(|s| s.name.as_str()),
        Some("llama3-8b-4xh200")
    );
    stage.keys(" fits=no<enter>");
    assert_eq!(names(&stage), ["prefetch-0"]);
    stage.keys("<esc>");
    assert_eq!(names(&stage).len(), 5);
    assert_eq!(
        stage.app.scenarios.current().map(|s| s.name.as_str()),
        Some("prefetch-0")
    );
    // An empty list causes no errors.
    stage.keys("/zzz<enter>rxwb<tab><enter><left>d");
    assert_eq!(stage.app.scenarios.current().map(|s| s.name.clone()), None);
}

/// A search without results selects nothing: numbers of other scenarios are not shown, and keys
/// explain why they have no effect.
#[test]
fn where_nothing_is_selected_nothing_is_shown() {
    let mut stage = Stage::new();
    stage.keys("j");
    let (ticket, _) = last_prediction(&stage);
    stage.keys("/zzz<enter>");
    // The answer for the previous selection arrives late.
    stage.tell(Message::Predicted {
        ticket,
        base: Some(glance("llama-tiny", &[], 7654.0)),
        now: Ok(glance("llama-tiny", &[], 7654.0)),
    });
    let screen = stage.screen(80, 24);
    assert!(screen.contains("no scenario is selected"), "{screen}");
    assert!(!screen.contains("7654"), "{screen}");
    let jobs = stage.app.jobs.len();
    for key in "rxwb".chars() {
        stage.app.notice = None;
        stage.keys(&key.to_string());
        let said = stage.app.notice.clone().map(|n| n.text).unwrap_or_default();
        assert!(said.starts_with("no scenario is selected"), "{key}: {said}");
        assert_eq!(
            (stage.app.view, stage.app.jobs.len()),
            (View::Scenarios, jobs)
        );
    }
}

/// The list and its filter use the numbers of the changed scenarios, which would be run.
#[test]
fn the_list_has_the_numbers_of_changed_scenarios() {
    let mut stage = Stage::new();
    stage.keys("jj/step>1000 step!=7654.3<enter>");
    stage.predicted(1076.7);
    stage.keys("<tab>/prefetch_f<enter><right>");
    let row = |stage: &mut Stage| {
        let screen = stage.screen(80, 24);
        let mut list = screen
            .lines()
            .map(|l| l.chars().take(31).collect::<String>());
        list.find(|l| l.contains("llama3-8b"))
    };
    assert!(row(&mut stage).unwrap().contains("1,077"));
    // It no longer passes the filter, but stays in the list while it is selected.
    stage.predicted(7654.3);
    let changed = row(&mut stage).unwrap();
    assert!(
        changed.contains('●') && changed.contains("7,654"),
        "{changed}"
    );
    stage.keys("<tab>j");
    assert_eq!(
        stage.app.scenarios.current().map(|s| s.name.as_str()),
        Some("prefetch-0")
    );
    assert_eq!(row(&mut stage), None);
    // In the next session, before it is selected.
    let saved = stage.app.save();
    let mut stage = Stage::with(&Saved {
        filter: String::new(),
        ..saved
    });
    let surveyed = stage.effects.iter().find_map(|e| match e {
        Effect::Survey(setups) => setups.last().cloned(),
        _ => None,
    });
    let surveyed = surveyed.unwrap();
    assert_eq!(surveyed.overrides, ["fsdp.prefetch_forward=2"]);
    stage.tell(Message::Surveyed(surveyed, Ok(brief(7654.3, 1.0, "yes"))));
    assert!(row(&mut stage).unwrap().contains("7,654"));
    // Without changes, the state is as before.
    stage.keys("k");
    stage.predicted(1076.7);
    stage.keys("D");
    assert!(row(&mut stage).unwrap().contains("1,077"));
}

#[test]
fn a_newer_job_of_a_kind_ends_the_older_and_late_news_are_ignored() {
    let mut stage = Stage::new();
    stage.keys("r1r");
    let ids: Vec<u32> = stage.app.jobs.keys().copied().collect();
    let [old, new] = ids[..] else {
        panic!("{ids:?}")
    };
    assert!(stage.effects.contains(&Effect::Cancel(old)));
    let run = || {
        News::Run(std::sync::Arc::new(crate::dash::lanes::Lanes::new(step(
            RunKind::Sim,
            0,
        ))))
    };
    stage.tell(Message::Job(old, run()));
    assert!(stage.app.runs.kept.is_empty());
    stage.tell(Message::Job(new, run()));
    assert_eq!(stage.app.runs.kept.len(), 1);
    stage.tell(Message::Job(old, News::Cancelled));
    stage.tell(Message::Job(new, News::Done));
    assert!(stage.app.jobs.is_empty());
    stage.tell(Message::Job(99, News::Failed("nobody".into())));
}

#[test]
fn a_training_is_stopped_once_and_its_run_is_kept() {
    let mut stage = Stage::new();
    stage.keys("x");
    assert!(matches!(
        started(&stage).last(),
        Some(Task::Train { anyway: false, .. })
    ));
    stage.keys("xss");
    let cancels = stage
        .effects
        .iter()
        .filter(|e| matches!(e, Effect::Cancel(_)))
        .count();
    assert_eq!(cancels, 1);
    stage.run(step(RunKind::Exec, 0));
    assert_eq!(stage.app.runs.kept.len(), 1);
    assert_eq!(stage.app.running(Purpose::Train), None);
}

/// A training that needs too much memory starts only after a confirmation.
#[test]
fn a_training_that_is_too_large_is_asked_about() {
    let reason = "its 1024 ranks keep 4.1 TiB between steps, and 12.0 GiB of memory are free here";
    let refused = || {
        let mut stage = Stage::new();
        stage.keys("x");
        stage.news(News::TooLarge(reason.into()));
        stage.news(News::Cancelled);
        stage
    };
    let trainings = |stage: &Stage| -> Vec<bool> {
        let all = started(stage).into_iter();
        all.filter_map(|t| match t {
            Task::Train { anyway, .. } => Some(*anyway),
            _ => None,
        })
        .collect()
    };
    let whole = |screen: &str| {
        // The pane wraps the text, so its words are compared without the frame.
        let words: Vec<&str> = screen
            .split([' ', '│', '"', '\n'])
            .filter(|w| !w.is_empty())
            .collect();
        words.join(" ").contains(reason)
    };
    let mut stage = refused();
    let screen = stage.screen(80, 24);
    assert!(
        screen.contains("is not started") && whole(&screen),
        "{screen}"
    );
    assert!(screen.contains("On a machine with GPUs"), "{screen}");
    stage.keys("n");
    assert_eq!(trainings(&stage), [false]);
    let screen = stage.screen(80, 24);
    assert!(screen.contains("not started") && whole(&screen), "{screen}");
    assert!(!screen.contains("stopped"), "{screen}");
    let mut stage = refused();
    stage.keys("y");
    assert_eq!(trainings(&stage), [false, true]);
    assert_eq!(stage.app.question, None);
}

/// `x` chooses the device by availability, `X` uses the CPU, also after the question about memory.
#[test]
fn a_training_is_where_the_key_says() {
    let trainings = |stage: &Stage| -> Vec<(bool, bool)> {
        let all = started(stage).into_iter();
        all.filter_map(|t| match t {
            Task::Train { on_cpu, anyway, .. } => Some((*on_cpu, *anyway)),
            _ => None,
        })
        .collect()
    };
    for (keys, on_cpu) in [("x", false), ("X", true), ("<tab>X", true), ("3X", true)] {
        let mut stage = Stage::new();
        stage.keys(keys);
        assert_eq!(trainings(&stage), [(on_cpu, false)], "{keys}");
        assert_eq!(stage.app.view, View::Train);
        stage.news(News::TooLarge("it is large".into()));
        stage.news(News::Cancelled);
        stage.keys("y");
        assert_eq!(trainings(&stage), [(on_cpu, false), (on_cpu, true)]);
    }
}

/// The training process has saved the run, so it is not saved again.
#[test]
fn a_run_that_is_kept_is_not_kept_again() {
    let keeps = |stage: &Stage| {
        let keeps = |t: &&&Task| matches!(t, Task::Keep(..));
        started(stage).iter().filter(keeps).count()
    };
    let mut stage = Stage::new();
    stage.app.keep = true;
    stage.keys("x");
    let lanes = || Arc::new(Lanes::new(step(RunKind::Exec, 0)));
    stage.news(News::Trained(lanes(), "20260101-000000000-abcdef".into()));
    stage.news(News::Done);
    assert_eq!(keeps(&stage), 0);
    let kept = &stage.app.runs.kept;
    assert_eq!(kept.len(), 1);
    assert_eq!(kept[0].stored.as_deref(), Some("20260101-000000000-abcdef"));
    let notice = stage.app.notice.as_ref().unwrap();
    assert!(notice.text.contains("saved as"), "{}", notice.text);
    assert!(stage.app.timeline.main.is_some());
    // A run that is not in any store yet is saved.
    stage.keys("x");
    stage.news(News::Run(lanes()));
    assert_eq!(keeps(&stage), 1);
}

#[test]
fn the_timeline_walks_zooms_and_stays_within_the_step() {
    let mut stage = Stage::new();
    stage.keys("r");
    stage.run(step(RunKind::Sim, 0));
    let t = |stage: &Stage| (stage.app.timeline.view(), stage.app.timeline.length());
    let (view, length) = t(&stage);
    assert_eq!((view.from, view.to), (0, length));
    for keys in [
        "++++",
        "LLLLLLLLLL",
        "----",
        "HHHH",
        "z",
        "Z",
        "GG",
        "g",
        "ncNp",
        "+++++++++++++++++++++++++++++",
        "b",
        "j",
        "kh",
    ] {
        stage.keys(keys);
        let (view, length) = t(&stage);
        assert!(view.from < view.to && view.to <= length, "{keys}: {view:?}");
        assert!(stage.app.timeline.selected_time().is_some(), "{keys}");
    }
    stage.keys("0ulayers.2 backward<enter>");
    let main = stage.app.timeline.main.clone().unwrap();
    let (unit, span) = main.find_unit("layers.2 backward").unwrap();
    let (view, _) = t(&stage);
    assert!(view.from <= unit.from && view.to >= unit.to && view.length() < 2 * unit.length());
    assert_eq!(stage.app.timeline.selected.map(|s| s.span), Some(span));
    stage.keys("unowhere<enter>");
    assert_eq!(
        stage.app.notice.as_ref().map(|n| n.text.as_str()),
        Some("no unit `nowhere` in this step")
    );
    stage.keys("0iadamw<enter>");
    let selected = stage.app.timeline.selected.unwrap().span;
    assert_eq!(main.name(selected), "adamw");
    // The span that it waited for.
    stage.keys("b");
    let blocker = stage.app.timeline.selected.unwrap().span;
    assert_eq!(main.label(blocker), "reduce_scatter layers.0");
}

#[test]
fn what_a_run_lacks_beside_it_is_of_the_other_kind() {
    for (kind, words) in [
        (RunKind::Sim, "train (1, x)"),
        (RunKind::Exec, "simulate (1, r)"),
    ] {
        let mut stage = Stage::new();
        stage.keys("r");
        stage.run(step(kind, 0));
        stage.keys("m");
        let said = stage.app.notice.map(|n| n.text).unwrap_or_default();
        assert!(said.contains(words), "{said}");
    }
}

#[test]
fn predicted_and_measured_lie_above_one_another() {
    let mut stage = Stage::new();
    stage.keys("r");
    stage.run(step(RunKind::Sim, 0));
    stage.keys("3x");
    stage.run(step(RunKind::Exec, 30));
    assert_eq!(stage.app.view, View::Train);
    let kind =
        |l: &Option<std::sync::Arc<crate::dash::lanes::Lanes>>| l.as_ref().map(|l| l.view.run.kind);
    assert_eq!(kind(&stage.app.timeline.main), Some(RunKind::Sim));
    assert_eq!(kind(&stage.app.timeline.other), Some(RunKind::Exec));
    let rows: Vec<usize> = stage.app.timeline.rows().iter().map(|r| r.run).collect();
    assert_eq!(rows, [0, 1, 0, 1, 0, 1]);
    stage.keys("2");
    let sim = stage.app.timeline.main.as_ref().unwrap().length;
    assert!(stage.app.timeline.length() > sim);
    stage.keys("s");
    assert_eq!(stage.app.timeline.length(), sim);
    // After the last of the other runs, none is shown.
    stage.keys("sm");
    assert_eq!(kind(&stage.app.timeline.other), None);
}

#[test]
fn a_point_of_the_sweep_becomes_the_options() {
    let mut stage = Stage::new();
    stage.keys("jj");
    stage.predicted(1000.0);
    stage.keys("wafsdp.prefetch_forward=[0, 2]<enter>");
    stage.news(News::Axes(vec!["fsdp.prefetch_forward".into()], 2));
    stage.news(News::Point(
        1,
        vec!["2".into()],
        Ok(brief(900.0, 50.0, "yes")),
    ));
    stage.news(News::Point(
        0,
        vec!["0".into()],
        Ok(brief(950.0, 49.0, "yes")),
    ));
    stage.news(News::Done);
    let order: Vec<usize> = stage.app.sweep.points.iter().map(|p| p.index).collect();
    assert_eq!(order, [0, 1]);
    assert!(stage.app.sweep.rows().iter().all(|r| r.front));
    stage.keys("ss");
    assert_eq!(stage.app.sweep.rows()[0].point, 1);
    stage.keys("<enter>");
    assert_eq!(
        (stage.app.view, stage.app.scenarios.pane),
        (View::Scenarios, Pane::Options)
    );
    assert_eq!(last_prediction(&stage).1, ["fsdp.prefetch_forward=2"]);
}

#[test]
fn why_a_sweep_could_not_be_stays_until_the_next() {
    let mut stage = Stage::new();
    stage.keys("4atrain.micro_batch=[1]<enter>w");
    stage.news(News::Failed("x.toml:1:20: at least 1\n  1 | [0]".into()));
    stage.keys("s");
    assert!(stage.screen(80, 24).contains(":1:20: at least 1"));
    stage.keys("dw");
    assert!(!stage.screen(80, 24).contains("at least 1"));
}

/// The message of `shardlab sweep --axis` is shown next to the line, which stays open for
/// correction.
#[test]
fn a_wrong_axis_is_refused_as_it_is_entered() {
    let mut stage = Stage::new();
    for (axis, why) in [
        ("fsdp.prefetch=[1]", "unknown key `prefetch` in [fsdp]"),
        (
            "train.micro_batch=[0]",
            "must be an integer from 1 to 1048576, not 0",
        ),
        ("train.micro_batch=2", "must be a list of values, not 2"),
    ] {
        stage.keys(&format!("4a{axis}<enter>"));
        let said = sweep_of(Path::new("small-native"), &[], &[axis.to_owned()]);
        let said = said.unwrap_err().to_string();
        assert!(said.contains(why), "{said}");
        let screen = stage.screen(160, 24);
        for line in said.lines() {
            assert!(screen.contains(line.trim_end()), "{line}\n{screen}");
        }
        assert_eq!(stage.app.sweep.axes, Vec::<String>::new());
        stage.keys("<esc>");
    }
    // Further typing clears the message, and a valid axis is accepted.
    stage.keys("atrain.micro_batch=[0]<enter><backspace>");
    assert!(!stage.screen(160, 24).contains("must be an integer"));
    stage.keys(", 1]<enter><backspace><backspace><backspace><backspace><backspace>1, 2]<enter>");
    assert_eq!(stage.app.sweep.axes, ["train.micro_batch=[1, 2]"]);
    assert!(stage.app.prompt.is_none());
}

#[test]
fn a_completed_list_is_typed_into() {
    let mut stage = Stage::new();
    stage.keys("4atrain.micro<tab>1, 2<enter>");
    assert_eq!(stage.app.sweep.axes, ["train.micro_batch=[1, 2]"]);
}

/// The table cannot be sorted by columns that do not fit.
#[test]
fn the_sweep_is_sorted_by_columns_that_are_drawn() {
    let mut stage = Stage::new();
    stage.keys("w");
    let keys = ["fsdp.prefetch_forward", "train.recompute"].map(str::to_owned);
    stage.news(News::Axes(keys.to_vec(), 1));
    let settings = vec!["1".into(), "none".into()];
    stage.news(News::Point(0, settings, Ok(brief(1.0, 1.0, "yes"))));
    for (width, titles) in [(80, 6), (160, 8)] {
        for keys in ["s", "S"] {
            let mut seen = BTreeSet::new();
            for _ in 0..20 {
                let screen = stage.screen(width, 24);
                seen.insert(stage.app.sweep.sort);
                // If the table is sorted by a column, it shows which one.
                assert_eq!(screen.contains('↑'), stage.app.sweep.sort > 0, "{screen}");
                stage.keys(keys);
            }
            // The order of the axes, two axes, and the visible titles.
            assert_eq!(seen.len(), 1 + 2 + titles, "{width} {seen:?}");
        }
    }
}

#[test]
fn a_point_that_cannot_be_does_not_become_the_options() {
    let mut stage = Stage::new();
    stage.keys("w");
    stage.news(News::Axes(vec!["fsdp.prefetch_forward".into()], 1));
    stage.news(News::Point(0, vec!["99".into()], Err("too deep".into())));
    stage.keys("<enter>");
    assert_eq!(stage.app.view, View::Sweep);
    assert_eq!(changes(&stage), Vec::<String>::new());
}

/// As in `sweep` and `compare`, memory means reserved memory.
#[test]
fn the_front_is_of_time_and_reserved_memory() {
    let mut sweep = SweepView::default();
    for (i, (ms, reserved, device)) in [(10.0, 1, 4), (20.0, 2, 3)].into_iter().enumerate() {
        let brief = Brief {
            reserved: Bytes(reserved),
            device: Bytes(device),
            ..brief(ms, 1.0, "yes")
        };
        sweep.point(i, vec![i.to_string()], Ok(brief));
    }
    let front: Vec<bool> = sweep.rows().iter().map(|r| r.front).collect();
    assert_eq!(front, [true, false]);
}

fn job(stage: &Stage, of: &str) -> u32 {
    let mut jobs = stage.app.jobs.iter();
    let found = jobs.find(|(_, j)| j.of == of && !j.cancelled);
    *found.expect("the job runs").0
}

/// Returns a run of the store with this prefetch and step time.
fn stored(id: &str, prefetch: &str, step_ms: f64) -> StoredRun {
    let fields = [
        ("id", id),
        ("kind", "sim"),
        ("scenario", "llama-tiny"),
        ("policy", "native"),
        ("hardware", "h200-nvlink"),
        ("world_size", "4"),
        ("created", "2026-11-23T12:40:05Z"),
        ("fsdp.prefetch_forward", prefetch),
    ];
    StoredRun {
        id: id.to_owned(),
        scenario: "llama-tiny".to_owned(),
        kind: "sim".to_owned(),
        made: "2026-11-23T12:40:05Z".to_owned(),
        step_ms,
        allocated: 1 << 30,
        loss: None,
        changes: format!("prefetch_forward={prefetch}"),
        name: None,
        fields: fields.map(|(k, v)| (k.to_owned(), v.to_owned())).into(),
    }
}

/// Opens view 5 with three saved runs.
fn with_stored() -> Stage {
    let mut stage = Stage::new();
    stage.keys("5R");
    let runs = [
        ("run-a", "0", 30.0),
        ("run-b", "4", 9.5),
        ("run-c", "4", 100.0),
    ];
    let runs = runs.map(|(id, prefetch, ms)| stored(id, prefetch, ms));
    stage.news(News::Stored(runs.to_vec()));
    stage.news(News::Done);
    stage
}

fn shown(stage: &Stage) -> Vec<String> {
    let runs = &stage.app.runs;
    let ids = runs.rows().into_iter().filter_map(|r| runs.of(r).id());
    ids.collect()
}

#[test]
fn runs_are_filtered_by_what_their_rows_show() {
    let mut stage = with_stored();
    for (filter, found) in [
        ("prefetch_forward=4", &["run-b", "run-c"][..]),
        ("fsdp.prefetch_forward!=4", &["run-a"]),
        ("policy=native step>20", &["run-a", "run-c"]),
        ("run-c", &["run-c"]),
        ("hardware=cpu", &[]),
    ] {
        stage.keys(&format!("/{filter}<enter>"));
        assert_eq!(shown(&stage), found, "{filter}");
    }
    let screen = stage.screen(80, 24);
    assert!(
        screen.contains("none of 3 passes; Esc shows all"),
        "{screen}"
    );
    assert!(!screen.contains("no runs yet"), "{screen}");
    stage.keys("<esc>");
    assert_eq!(shown(&stage).len(), 3);
}

/// With 80 columns, the options that distinguish the runs are visible.
#[test]
fn stored_runs_have_columns() {
    let mut stage = with_stored();
    stage.app.runs.stored[1].name = Some("best".into());
    stage.keys("j");
    insta::assert_snapshot!("runs_stored_80x24", stage.screen(80, 24));
    insta::assert_snapshot!("runs_stored_120x40", stage.screen(120, 40));
}

fn typed(stage: &Stage) -> (String, String) {
    let prompt = stage.app.prompt.as_ref();
    prompt.map_or_else(Default::default, |p| {
        let refused = p.refused.clone().unwrap_or_default();
        (p.line.text().to_owned(), refused)
    })
}

#[test]
fn fields_that_do_not_exist_are_refused_and_those_that_do_are_completed() {
    let mut stage = with_stored();
    stage.keys("/prefetch_forwrd=1<enter>");
    assert_eq!(
        typed(&stage).1,
        "unknown field `prefetch_forwrd`; the nearest is `prefetch_forward`"
    );
    stage.keys("<ctrl-u>bogusly=1<enter>");
    assert!(
        typed(&stage)
            .1
            .starts_with("unknown field `bogusly`; there are step, alloc, loss, id,")
    );
    // The corrected filter is accepted.
    stage.keys("<ctrl-u>step<tab>");
    stage.keys("<esc>/tiny kin<tab>");
    assert_eq!(typed(&stage).0, "tiny kind=");
    stage.keys("<tab>");
    assert_eq!(typed(&stage).0, "tiny kind=sim");
    stage.keys("<enter>");
    assert_eq!(
        (stage.app.runs.filter.as_str(), shown(&stage).len()),
        ("tiny kind=sim", 3)
    );
    for view in ["1", "4"] {
        stage.keys(&format!("{view}/bogusly=1<enter>"));
        let refused = typed(&stage).1;
        assert!(
            refused.starts_with("unknown field `bogusly`; there are step, tokens,"),
            "{refused}"
        );
        stage.keys("<esc>");
    }
    stage.keys("1/fit<tab><tab>");
    assert_eq!(typed(&stage).0, "fits=no");
}

#[test]
fn runs_are_sorted_named_and_removed() {
    let mut stage = with_stored();
    // By kind, scenario, date and step time.
    stage.keys("ssss");
    assert_eq!(shown(&stage), ["run-b", "run-a", "run-c"]);
    stage.keys("oj");
    assert_eq!(shown(&stage), ["run-c", "run-a", "run-b"]);
    stage.keys("ebest<enter>");
    let named = Task::Name {
        id: "run-a".into(),
        name: Some("best".into()),
    };
    assert_eq!(started(&stage).last(), Some(&&named));
    let before = stage.effects.len();
    stage.keys("dn");
    assert_eq!((stage.effects.len(), stage.app.question), (before, None));
    stage.keys("d");
    assert!(
        stage
            .screen(80, 24)
            .contains("Remove run-a from the store?")
    );
    stage.keys("y");
    assert_eq!(started(&stage).last(), Some(&&Task::Remove("run-a".into())));
    stage.news(News::Removed("run-a".into()));
    assert_eq!(shown(&stage), ["run-c", "run-b"]);
    // A run of this session that is not saved cannot be removed.
    stage.keys("1r");
    stage.run(step(RunKind::Sim, 0));
    stage.keys("5/#1<enter>gd");
    assert_eq!(stage.app.question, None);
}

/// The line starts with the run's current name. Emptying it removes the name. Only after that does
/// removing the run ask a question.
#[test]
fn a_run_that_has_a_name_is_not_removed_and_the_name_can_be_taken_away() {
    let mut stage = with_stored();
    stage.app.runs.stored[0].name = Some("best".into());
    assert_eq!(shown(&stage)[0], "run-a");
    let before = stage.effects.len();
    stage.keys("gd");
    assert_eq!((stage.effects.len(), stage.app.question), (before, None));
    let screen = stage.screen(120, 40);
    let refused = "run-a is kept because it has the name best; e and an empty line remove the name";
    assert!(screen.contains(refused), "{screen}");
    // An unchanged name has no effect.
    stage.keys("e<enter>");
    assert_eq!(stage.effects.len(), before);
    stage.keys("e<ctrl-u> <enter>");
    let (id, name) = ("run-a".into(), None);
    assert_eq!(started(&stage).last(), Some(&&Task::Name { id, name }));
    stage.app.runs.stored[0].name = None;
    let before = stage.effects.len();
    stage.keys("e<enter>");
    assert_eq!(stage.effects.len(), before, "there is none");
    stage.keys("d");
    assert!(stage.app.question.is_some());
}

/// The store's own rules apply: a named run is not removed.
#[test]
fn the_store_names_and_removes() {
    let folder = tempfile::tempdir().unwrap();
    let store = Some(folder.path());
    let ids: Vec<String> = [0, 20]
        .map(|slow| judge::keep(store, &step(RunKind::Sim, slow)).unwrap())
        .into();
    // Each name replaces the previous one.
    judge::name(store, &ids[0], Some("first")).unwrap();
    judge::name(store, &ids[0], Some("best")).unwrap();
    judge::name(store, &ids[1], Some("other")).unwrap();
    judge::name(store, &ids[1], None).unwrap();
    judge::name(store, &ids[1], None).unwrap();
    let names = Store::at(folder.path()).names().unwrap();
    let names: Vec<_> = names.iter().map(|(n, id)| (&**n, id.as_str())).collect();
    assert_eq!(names, [("best", ids[0].as_str())]);
    assert!(judge::name(store, &ids[0], Some("a/b")).is_err());
    let refused = judge::remove(store, &ids[0]).unwrap_err();
    assert!(refused.ends_with("has the name best"), "{refused}");
    judge::remove(store, &ids[1]).unwrap();
    let left = judge::stored(store).unwrap();
    let left: Vec<_> = left
        .iter()
        .map(|r| (r.id.as_str(), r.name.as_deref()))
        .collect();
    assert_eq!(left, [(ids[0].as_str(), Some("best"))]);
}

#[test]
fn a_configuration_leaves_as_a_command_and_as_a_file() {
    let mut stage = Stage::new();
    stage.predicted(1000.0);
    stage.keys("<tab>/prefetch_f<enter><enter><ctrl-u>{ elements = 5 }<enter>");
    stage.predicted(990.0);
    stage.keys("y");
    let command = "shardlab sim llama-tiny --set 'fsdp.prefetch_forward={ elements = 5 }'";
    assert_eq!(stage.effects.last(), Some(&Effect::Copy(command.into())));
    assert!(stage.screen(120, 40).contains(command));
    stage.keys("W");
    assert_eq!(typed(&stage).0, "llama-tiny-changed.toml");
    stage.keys("<ctrl-u>mine<enter>");
    let Some(Task::Export(export)) = started(&stage).last().copied().cloned() else {
        panic!("it is written");
    };
    assert_eq!(
        (export.path.to_str(), export.overwrite),
        (Some("mine.toml"), false)
    );
    assert_eq!(
        export.setup.overrides,
        ["fsdp.prefetch_forward={ elements = 5 }"]
    );
    stage.news(News::Exists);
    let before = stage.effects.len();
    assert!(stage.screen(80, 24).contains("mine.toml already exists"));
    stage.keys("n");
    assert_eq!(stage.effects.len(), before);
    stage.keys("W<ctrl-u>mine<enter>");
    stage.news(News::Exists);
    stage.keys("y");
    let written = started(&stage).last().copied().cloned();
    assert!(
        matches!(written, Some(Task::Export(e)) if e.overwrite),
        "it is meant"
    );
}

/// Only `.toml` is an extension.
#[test]
fn dots_are_part_of_a_scenarios_name() {
    let name = |path: &str| {
        let overrides = Vec::new();
        let path = path.into();
        Setup { path, overrides }.name()
    };
    for path in ["llama3.2-1b-4xh200", "jobs/llama3.2-1b-4xh200.toml"] {
        assert_eq!(name(path), "llama3.2-1b-4xh200");
    }
    let mut stage = Stage::new();
    stage.predicted(1000.0);
    for (typed, path) in [("mine-3.2", "mine-3.2.toml"), ("a.b.toml", "a.b.toml")] {
        stage.keys(&format!("W<ctrl-u>{typed}<enter>"));
        let written = started(&stage).last().copied().cloned();
        assert!(
            matches!(&written, Some(Task::Export(e)) if e.path.to_str() == Some(path)),
            "{written:?}"
        );
    }
}

/// Copies the selected point with its axes, which override earlier changes.
#[test]
fn a_point_of_the_sweep_leaves_as_a_command() {
    let mut stage = Stage::new();
    stage.keys("<tab>/prefetch_f<enter><enter><ctrl-u>1<enter>");
    stage.predicted(990.0);
    stage.keys("wy");
    assert!(
        !stage.effects.iter().any(|e| matches!(e, Effect::Copy(_))),
        "there is no point"
    );
    stage.news(News::Axes(vec!["fsdp.prefetch_forward".into()], 1));
    let settings = vec!["2".to_owned()];
    stage.news(News::Point(0, settings, Ok(brief(900.0, 50.0, "yes"))));
    stage.keys("y");
    let command = "shardlab sim llama-tiny --set fsdp.prefetch_forward=2";
    assert_eq!(stage.effects.last(), Some(&Effect::Copy(command.into())));
}

/// Jobs that save or open runs work on one run each, so starting the next one must not drop the
/// result of the previous one.
#[test]
fn every_run_that_is_kept_or_opened_counts() {
    let mut stage = Stage::new();
    for slow in [0, 20] {
        stage.keys("1r");
        stage.run(step(RunKind::Sim, slow));
    }
    stage.keys("5KKjK");
    for number in [2, 1] {
        let id = job(&stage, &format!("#{number}"));
        stage.tell(Message::Job(id, News::Kept(number, format!("id-{number}"))));
        stage.tell(Message::Job(id, News::Done));
    }
    let stored = stage.app.runs.kept.iter().map(|k| k.stored.as_deref());
    assert_eq!(stored.collect::<Vec<_>>(), [Some("id-1"), Some("id-2")]);
    let keeps = |task: &&&Task| matches!(task, Task::Keep(..));
    assert_eq!(started(&stage).iter().filter(keeps).count(), 2);

    let mut stage = Stage::new();
    let run = |id: &str| StoredRun {
        id: id.to_owned(),
        scenario: "llama-tiny".to_owned(),
        kind: "sim".to_owned(),
        made: String::new(),
        step_ms: 1.0,
        allocated: 1,
        loss: None,
        changes: String::new(),
        name: None,
        fields: BTreeMap::new(),
    };
    stage.keys("5R");
    stage.news(News::Stored(["a", "b", "c"].map(run).to_vec()));
    stage.news(News::Done);
    // Two runs are marked, the second one twice, and the third is shown.
    stage.keys(" j  j<enter>");
    for (id, slow) in [("a", 0), ("b", 20), ("b", 20), ("c", 40)] {
        let id = job(&stage, id);
        let lanes = Lanes::new(step(RunKind::Sim, slow));
        stage.tell(Message::Job(id, News::Run(Arc::new(lanes))));
        stage.tell(Message::Job(id, News::Done));
    }
    assert_eq!(stage.app.runs.marked, [1, 2]);
    assert_eq!(stage.app.runs.kept.len(), 3);
    assert_eq!(stage.app.view, View::Timeline);
}

#[test]
fn marked_runs_are_compared_in_order_of_marking() {
    let mut stage = Stage::new();
    stage.keys("6c");
    assert!(
        started(&stage)
            .iter()
            .all(|t| !matches!(t, Task::Compare(_)))
    );
    for slow in [0, 10, 20] {
        stage.keys("1r");
        stage.run(step(RunKind::Sim, slow));
    }
    // Newest first: the third is marked as the base, then the first.
    stage.keys("5 j c");
    let Some(Task::Compare(runs)) = started(&stage).last().copied() else {
        panic!("a comparison was asked for");
    };
    let order: Vec<bool> = [2, 0]
        .iter()
        .zip(&runs.0)
        .map(|(i, run)| std::sync::Arc::ptr_eq(&stage.app.runs.kept[*i].lanes.view, &run.1))
        .collect();
    assert_eq!(order, [true, true]);
}

#[test]
fn the_mouse_selects_zooms_and_can_be_turned_off() {
    let mut stage = Stage::new();
    stage.screen(80, 24);
    let mouse = |kind, column, row| {
        Event::Mouse(MouseEvent {
            kind,
            column,
            row,
            modifiers: KeyModifiers::NONE,
        })
    };
    let down = MouseEventKind::Down(MouseButton::Left);
    stage.event(mouse(down, 5, 5));
    assert_eq!(stage.app.scenarios.cursor.at, 2);
    stage.event(mouse(MouseEventKind::ScrollUp, 5, 5));
    assert_eq!(stage.app.scenarios.cursor.at, 1);
    stage.event(mouse(down, 16, 0));
    assert_eq!(stage.app.view, View::Timeline);
    stage.keys("1r");
    stage.run(step(RunKind::Sim, 0));
    stage.screen(80, 24);
    let (all, row) = (stage.app.timeline.length(), 6);
    stage.event(mouse(MouseEventKind::ScrollUp, 40, row));
    let zoomed = stage.app.timeline.view();
    assert!(zoomed.length() < all && zoomed.from > 0);
    stage.event(mouse(down, 40, row));
    stage.event(mouse(MouseEventKind::Drag(MouseButton::Left), 50, row));
    assert!(stage.app.timeline.view().from < zoomed.from);
    stage.event(mouse(MouseEventKind::Up(MouseButton::Left), 50, row));
    let (theme, view) = (stage.app.theme, stage.app.timeline.view());
    stage.keys("t");
    assert_ne!(stage.app.theme, theme);
    stage.event(Event::Key(ratatui::crossterm::event::KeyEvent::new(
        ratatui::crossterm::event::KeyCode::Char('t'),
        KeyModifiers::CONTROL,
    )));
    assert_eq!(stage.effects.last(), Some(&Effect::Mouse(false)));
    stage.event(mouse(MouseEventKind::ScrollUp, 40, row));
    assert_eq!(stage.app.timeline.view(), view);
}

#[test]
fn leaving_keeps_the_state_and_coming_back_restores_it() {
    let mut stage = Stage::new();
    stage.keys("jj");
    stage.predicted(1000.0);
    stage.keys("<tab>/prefetch_f<enter><right><tab>tq");
    let [.., Effect::Save(saved), Effect::Quit] = &stage.effects[..] else {
        panic!("{:?}", stage.effects.last());
    };
    assert_eq!(saved.theme.as_deref(), Some("light"));
    let again = Stage::with(saved);
    assert_eq!(
        again.app.scenarios.current().map(|s| s.name.as_str()),
        Some("llama3-8b-4xh200")
    );
    assert_eq!(last_prediction(&again).1, ["fsdp.prefetch_forward=2"]);
    // The selected scenario may no longer exist.
    let gone = Saved {
        scenario: Some("gone".into()),
        filter: "zzz".into(),
        sweep_sort: 900,
        ..Saved::default()
    };
    let mut stage = Stage::with(&gone);
    assert_eq!(stage.app.scenarios.cursor.at, 0);
    stage.keys("4");
    stage.screen(80, 24);
}

/// Files with equal names in two folders are two scenarios, and neither is a shipped one.
#[test]
fn kept_changes_are_of_one_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = |sub: &str, name: &str| {
        let path = folder.path().join(sub).join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, "extends = \"llama-tiny\"\n").unwrap();
        path
    };
    let source = |name: &str, path: PathBuf| Source::new(name.into(), path, String::new());
    let here = file("here", "train.toml");
    // The same file, by another path.
    let again = folder.path().join("there/../here/train.toml");
    let sources = || {
        vec![
            source("train", file("there", "train.toml")),
            source("train", again.clone()),
            source("llama-tiny", file("here", "llama-tiny.toml")),
            source("small-linear", "small-linear".into()),
        ]
    };
    let change = |steps: &str| BTreeMap::from([("train.steps".to_owned(), steps.to_owned())]);
    let saved = Saved {
        overrides: [
            (
                here.canonicalize().unwrap().display().to_string(),
                change("3"),
            ),
            // In the old format: by name.
            ("train".into(), change("4")),
            ("llama-tiny".into(), change("5")),
            ("small-linear".into(), change("6")),
        ]
        .into(),
        ..Saved::default()
    };
    let theme = Theme::new(Name::Dark, Depth::True);
    let (mut app, _) = App::new(sources(), theme, &saved);
    let mut found = Vec::new();
    for row in 0..4 {
        app.scenarios.cursor.at = row;
        found.push(app.setup().unwrap().overrides);
    }
    let none = Vec::<String>::new();
    assert_eq!(
        found,
        [
            none.clone(),
            vec!["train.steps=3".to_owned()],
            none,
            vec!["train.steps=6".to_owned()]
        ]
    );
    // The selected one is selected again, not the first one with its name.
    app.scenarios.cursor.at = 1;
    let (app, _) = App::new(sources(), theme, &app.save());
    assert_eq!(app.scenarios.cursor.at, 1);
}

#[test]
fn kept_changes_of_a_requested_scenario_are_reported() {
    let mut stage = Stage::new();
    tell_kept(&mut stage.app);
    assert_eq!(stage.app.notice, None);
    stage.keys("<tab>/prefetch_f<enter><right>");
    stage.keys("/prefetch_b<enter><right>");
    tell_kept(&mut stage.app);
    let said = stage.app.notice.clone().map(|n| n.text).unwrap();
    assert_eq!(said, "2 changes from last time; D takes them back");
    stage.keys("D");
    assert_eq!(changes(&stage), Vec::<String>::new());
}

#[test]
fn ctrl_c_leaves_but_only_ends_what_is_being_typed() {
    let mut stage = Stage::new();
    stage.keys("/abc<ctrl-c>");
    assert_eq!(stage.app.prompt, None);
    assert_eq!(stage.app.scenarios.filter, "");
    assert!(!stage.effects.contains(&Effect::Quit));
    stage.keys("?<ctrl-c>");
    assert_eq!(stage.effects.last(), Some(&Effect::Quit));
}

#[test]
fn notices_go_with_time() {
    let mut stage = Stage::new();
    stage.keys("t");
    stage.event(Event::Tick(Duration::from_secs(5)));
    assert!(stage.app.notice.is_some());
    stage.event(Event::Tick(Duration::from_secs(9)));
    assert!(stage.app.notice.is_none());
}

/// Quitting would end a training, so it asks first. Ctrl-C does not.
#[test]
fn quitting_while_a_training_runs_is_asked_about() {
    let mut stage = Stage::new();
    stage.keys("xq");
    assert!(!stage.effects.contains(&Effect::Quit));
    let screen = stage.screen(80, 24);
    assert!(screen.contains("is still training"), "{screen}");
    stage.keys("n");
    assert_eq!(stage.app.question, None);
    stage.keys("1qy");
    assert_eq!(stage.effects.last(), Some(&Effect::Quit));
    let mut stage = Stage::new();
    stage.keys("x<ctrl-c>");
    assert_eq!(stage.effects.last(), Some(&Effect::Quit));
    // A training that is stopping would be lost as well, and no other one starts at the same time.
    let mut stage = Stage::new();
    stage.keys("xsq");
    assert!(!stage.effects.contains(&Effect::Quit));
    let screen = stage.screen(80, 24);
    assert!(screen.contains("llama-tiny is still stopping"), "{screen}");
    stage.keys("nx");
    let trainings = |task: &&&Task| matches!(task, Task::Train { .. });
    assert_eq!(started(&stage).iter().filter(trainings).count(), 1);
    // The training ends while the question is open, so the question disappears.
    stage.keys("q");
    stage.run(step(RunKind::Exec, 0));
    assert_eq!(stage.app.question, None);
    let mut stage = Stage::new();
    stage.keys("xsqy");
    assert_eq!(stage.effects.last(), Some(&Effect::Quit));
    // After the end, quitting asks no question.
    let mut stage = Stage::new();
    stage.keys("x");
    stage.run(step(RunKind::Exec, 0));
    stage.keys("q");
    assert_eq!(stage.effects.last(), Some(&Effect::Quit));
}

/// One key applies the selected change to the options and predicts again; another key undoes it.
#[test]
fn a_change_is_applied_and_undone_with_one_key_each() {
    let mut stage = Stage::new();
    stage.keys("i");
    assert!(matches!(started(&stage).last(), Some(Task::Explain(_))));
    let found = explained(&stage);
    stage.news(News::Explained(Arc::new(found)));
    stage.news(News::Done);
    // Returning to the view predicts nothing again.
    let jobs = started(&stage).len();
    stage.keys("18");
    assert_eq!(started(&stage).len(), jobs);
    stage.keys("jj<enter>");
    let applied = ["train.recompute=full", "train.recompute_layers=16"];
    assert_eq!(changes(&stage), applied);
    assert_eq!(last_prediction(&stage).1, applied);
    let Some(Task::Explain(setup)) = started(&stage).last() else {
        panic!("no explanation of the result")
    };
    assert_eq!(setup.overrides, applied);
    // Until the new result arrives, the shown changes are those of another state and have no
    // effect.
    stage.keys("<up><enter>");
    assert_eq!(changes(&stage), applied);
    stage.keys("u");
    assert_eq!(changes(&stage), [""; 0]);
    stage.keys("u");
    assert!(
        stage
            .app
            .notice
            .as_ref()
            .unwrap()
            .text
            .contains("nothing to undo")
    );
}

#[test]
fn an_impossible_change_is_not_applied() {
    let mut stage = Stage::new();
    stage.keys("8");
    let found = explained(&stage);
    stage.news(News::Explained(Arc::new(found)));
    stage.news(News::Done);
    // Without `a`, only changes that help are listed.
    stage.keys("G");
    assert_eq!(stage.app.whatif.rows().len(), 4);
    stage.keys("aG<enter>");
    assert_eq!(changes(&stage), [""; 0]);
    let notice = &stage.app.notice.as_ref().unwrap().text;
    assert!(notice.starts_with("impossible: "), "{notice}");
}

/// The best settings are applied with one key and undone with another. Nothing is searched until
/// then.
#[test]
fn the_best_settings_are_applied_and_undone() {
    let mut stage = Stage::new();
    let before = stage.effects.len();
    stage.keys("0");
    assert_eq!(stage.effects.len(), before);
    stage.keys("1o");
    let Some(Effect::Start(_, Task::Tune(setup))) = stage.effects.last() else {
        panic!("{:?}", stage.effects.last())
    };
    assert_eq!(Some(setup), stage.app.setup().as_ref());
    assert_eq!(stage.app.view, View::Tune);
    stage.news(News::Searched("3 predicted, best 1.0 ms, 1.0 GiB".into()));
    let found = tuned(&stage);
    stage.news(News::Explained(Arc::new(found)));
    stage.news(News::Done);
    assert_eq!(stage.app.tune.progress, None);
    stage.keys("<enter>");
    assert_eq!(changes(&stage), ["compile.mode=blocks"]);
    // The shown settings are now those of an earlier state.
    stage.keys("j<enter>");
    assert_eq!(changes(&stage), ["compile.mode=blocks"]);
    let notice = &stage.app.notice.as_ref().unwrap().text;
    assert!(
        notice.contains("u undoes that, o searches again"),
        "{notice}"
    );
    stage.keys("u");
    assert_eq!(changes(&stage), [""; 0]);
    stage.keys("j<enter>");
    assert_ne!(changes(&stage), [""; 0]);
}

/// A search that is cancelled shows the best settings so far.
#[test]
fn a_cancelled_search_keeps_what_it_has() {
    let mut stage = Stage::new();
    stage.keys("o<esc>");
    assert!(matches!(stage.effects.last(), Some(Effect::Cancel(_))));
    let found = tuned(&stage);
    stage.news(News::Explained(Arc::new(found)));
    stage.news(News::Cancelled);
    assert_eq!(stage.app.tune.rows().len(), 3);
}

/// The fit view predicts once per state of the scenario.
#[test]
fn fit_is_asked_when_the_scenario_has_changed() {
    let mut stage = Stage::new();
    let count = |stage: &Stage| {
        let is_fit = |e: &&Effect| matches!(e, Effect::Start(_, Task::Fit { .. }));
        stage.effects.iter().filter(is_fit).count()
    };
    stage.keys("9");
    assert_eq!(count(&stage), 1);
    let setup = stage.app.setup().unwrap();
    stage.news(News::Fitted(setup, Arc::default()));
    stage.news(News::Done);
    stage.keys("19");
    assert_eq!(count(&stage), 1);
    stage.keys("1jf");
    assert_eq!(count(&stage), 2);
    stage.news(News::Failed("too bad".into()));
    assert!(stage.screen(80, 24).contains("✗ too bad"));
}

/// Matching names rank before matching descriptions, whatever was selected before.
#[test]
fn a_search_ranks_names_first() {
    let mut stage = Stage::new();
    let set = |stage: &mut Stage, at: usize, name: &str, about: &str| {
        let s = &mut stage.app.scenarios.sources[at];
        (s.name, s.about) = (name.to_owned(), about.to_owned());
    };
    set(&mut stage, 0, "prefetch-0", "Compare with prefetch-1.");
    set(&mut stage, 1, "prefetch-10", "Ten.");
    set(&mut stage, 2, "my-prefetch-1", "One.");
    set(&mut stage, 3, "prefetch-1", "One.");
    stage.keys("/prefetch-1<enter>");
    let s = &stage.app.scenarios;
    let names: Vec<&str> = s
        .rows()
        .iter()
        .map(|&i| s.sources[i].name.as_str())
        .collect();
    assert_eq!(
        names,
        ["prefetch-1", "prefetch-10", "my-prefetch-1", "prefetch-0"]
    );
    assert_eq!(s.current().unwrap().name, "prefetch-1");
}

/// Scenarios for tests come last, are listed only on request, and are found by a search.
#[test]
fn tests_are_apart_from_examples() {
    let mut stage = Stage::new();
    for at in [0, 3] {
        stage.app.scenarios.sources[at].is_test = true;
    }
    stage.app.scenarios.select("llama3-8b-4xh200");
    stage.keys("jk");
    let names = |stage: &Stage| -> Vec<String> {
        let s = &stage.app.scenarios;
        let rows = s.rows();
        rows.iter().map(|&i| s.sources[i].name.clone()).collect()
    };
    let examples = ["llama3-70b-64xh100", "llama3-8b-4xh200", "toy-cnn"];
    assert_eq!(names(&stage), examples);
    assert!(stage.screen(80, 24).contains("Scenarios 3, T: +2"));
    let selected = stage.app.scenarios.current().unwrap().name.clone();
    stage.keys("T");
    assert_eq!(names(&stage)[..3], examples);
    assert_eq!(names(&stage)[3..], ["llama-tiny", "prefetch-0"]);
    assert_eq!(stage.app.scenarios.current().unwrap().name, selected);
    assert!(stage.screen(80, 24).contains("── tests and benchmarks"));
    assert!(stage.app.save().with_tests);
    stage.keys("T/tiny");
    assert_eq!(names(&stage), ["llama-tiny"]);
}
