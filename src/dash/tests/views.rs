//! Every view at the smallest size and at a large size, with synthetic numbers that do not depend
//! on the simulator.

use crate::dash::app::Tone;
use crate::dash::event::{
    Effect, Event, Judged, Message, News, RankNow, RankStep, Setup, StepNews, Task,
};
use crate::dash::judge;
use crate::dash::options;
use crate::dash::tables::{Page, Series, Table};
use crate::dash::testing::{Stage, brief, explained, glance, step, tuned};
use crate::dash::theme::{Depth, Name, Theme};
use crate::dash::worker::Stop;
use crate::predict::Profiles;
use insta::assert_snapshot;
use ratatui::style::Color;
use shardlab_exec::train::ParamNorm;
use shardlab_plan::config::Gate;
use shardlab_plan::record::RunKind;
use shardlab_plan::scenario::BatchUnit;
use shardlab_reports::RunView;
use shardlab_reports::gate::{Baseline, Limits};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

const SIZES: [(u16, u16); 2] = [(80, 24), (160, 50)];

fn both(name: &str, stage: &mut Stage) {
    for (width, height) in SIZES {
        assert_snapshot!(
            format!("{name}_{width}x{height}"),
            stage.screen(width, height)
        );
    }
}

/// Predictions of mixtures of experts describe how experts are divided, and the time for tokens and
/// matmuls.
#[test]
fn experts_are_described() {
    let mut stage = Stage::new();
    let mut glance = (*crate::dash::testing::glance("small-moe-ep", &[], 5.0)).clone();
    glance.experts = vec![
        "4 of 8 on each rank, top 2; ep 2, gather; routing balanced, imbalance 1.00".to_owned(),
        "192 rows, 96 expected; dispatch 1.20 ms, combine 0.80 ms, matmuls 2.10 ms".to_owned(),
    ];
    stage.app.scenarios.glance = Some(Arc::new(glance));
    let screen = stage.screen(160, 50);
    for part in [
        "experts  4 of 8 on each rank, top 2; ep 2, gather;",
        "192 rows, 96 expected;",
        "matmuls 2.10 ms",
    ] {
        assert!(screen.contains(part), "{screen}");
    }
}

#[test]
fn scenarios() {
    let mut stage = Stage::new();
    assert_snapshot!("scenarios_80x24", stage.screen(80, 24));
    // Only some of the options, so that the large screen does not change with every new key.
    stage.app.scenarios.option_filter = "prefetch".into();
    assert_snapshot!("scenarios_160x50", stage.screen(160, 50));
    stage.app.scenarios.option_filter.clear();
    // A changed option, in the editor.
    stage.keys("/8b<enter><enter>");
    stage.predicted(1076.7);
    stage.keys("/prefetch<enter><right>");
    stage.predicted(1043.2);
    both("options_changed", &mut stage);
    stage.keys("<enter>");
    both("options_editing", &mut stage);
    stage.keys("<ctrl-u>x");
    stage.tell(Message::Predicted {
        ticket: stage.app.scenarios.ticket,
        base: None,
        now: Err(
            "`fsdp.prefetch_forward` must be an integer from 0 to 64 or \"implicit\", not a string"
                .into(),
        ),
    });
    both("options_refused", &mut stage);
}

/// Also on the smallest screen and without colours.
#[test]
fn what_does_not_fit_says_so_with_changes() {
    let mut stage = Stage::new();
    stage.app.theme = Theme::new(Name::Mono, Depth::None);
    stage.keys("<tab>/prefetch_f<enter><right>");
    for (fits, word, gib) in [("no", "✗ no fit", 1234.0), ("tight", "! tight", 130.0)] {
        let mut now = (*glance("llama-tiny", &["fsdp.prefetch_forward=2"], 1000.0)).clone();
        now.brief = brief(1000.0, gib, fits);
        stage.tell(Message::Predicted {
            ticket: stage.app.scenarios.ticket,
            base: Some(glance("llama-tiny", &[], 1076.7)),
            now: Ok(Arc::new(now)),
        });
        let screen = stage.screen(80, 24);
        let row = screen.lines().find(|l| l.contains("memory  ")).unwrap();
        assert!(row.contains(word), "{row}");
    }
    // Also in the list.
    let screen = stage.screen(80, 24);
    assert!(
        screen.contains("1,300 ✗") && screen.contains("9,032 !"),
        "{screen}"
    );
}

/// A message is shown as far as there is room; a key shows the rest.
#[test]
fn long_messages_can_be_read_to_their_end() {
    let mut stage = Stage::new();
    let words: Vec<String> = (0..60).map(|i| format!("word{i}")).collect();
    let words = format!("{} end", words.join(" "));
    stage.keys("j");
    let tell = |stage: &mut Stage, text: &str| {
        stage.tell(Message::Predicted {
            ticket: stage.app.scenarios.ticket,
            base: None,
            now: Err(text.into()),
        });
    };
    // If there is nothing else to show, the message gets the whole pane.
    tell(&mut stage, &words[..200]);
    let screen = stage.screen(80, 24);
    assert!(
        screen.contains(words[..200].split(' ').next_back().unwrap()),
        "{screen}"
    );
    tell(&mut stage, &words);
    assert_snapshot!("message_cut_80x24", stage.screen(80, 24));
    stage.keys("e");
    assert_snapshot!("message_whole_80x24", stage.screen(80, 24));
    // It scrolls exactly to its end, and the keys of the view below it have no effect.
    stage.keys("jjjjjjrG");
    assert!(stage.screen(80, 24).contains("word59 end"));
    assert_eq!(stage.app.jobs.len(), 0);
    stage.keys("e");
    assert!(stage.app.whole.is_none());
    // The same applies to a prediction.
    stage.predicted(1000.0);
    stage.keys("e");
    let screen = stage.screen(80, 24);
    assert!(screen.contains("compute."), "{screen}");
    stage.keys("q");
    assert!(stage.app.whole.is_none());
    assert!(!stage.effects.contains(&Effect::Quit));
}

#[test]
fn timeline() {
    let mut stage = Stage::new();
    stage.keys("2");
    both("timeline_empty", &mut stage);
    stage.keys("1r");
    stage.run(step(RunKind::Sim, 0));
    both("timeline_whole", &mut stage);
    stage.keys("ulayers.2 back");
    both("timeline_jumping", &mut stage);
    stage.keys("<enter>c");
    both("timeline_unit", &mut stage);
    stage.keys("0n");
    assert_snapshot!("timeline_exposed_80x24", stage.screen(80, 24));
    stage.app.theme = Theme::new(Name::Mono, Depth::None);
    both("timeline_mono", &mut stage);
}

#[test]
fn timeline_of_prediction_and_measurement() {
    let mut stage = Stage::new();
    stage.keys("r");
    stage.run(step(RunKind::Sim, 0));
    stage.keys("3x");
    stage.run(step(RunKind::Exec, 30));
    stage.keys("2j");
    both("timeline_pair", &mut stage);
}

fn news(step: u64) -> News {
    let ranks = (0..4).map(|r| RankStep {
        time: Duration::from_millis(118 + r),
        host: Duration::from_millis(40),
        allocated: 150 << 20,
        reserved: 180 << 20,
    });
    News::Step(StepNews {
        step,
        steps: 40,
        loss: 4.0 / step as f64 + 2.5,
        grad_norm: Some(0.75),
        lr: 3e-4,
        time: Duration::from_millis(120 + step % 3),
        tokens: 4096,
        counted_in: BatchUnit::Tokens,
        ranks: ranks.collect(),
    })
}

#[test]
fn training() {
    let mut stage = Stage::new();
    stage.keys("3");
    both("train_empty", &mut stage);
    stage.keys("x");
    stage.news(News::On("the CPU, ranks as threads".into()));
    for i in 1..=25 {
        stage.news(news(i));
        if i % 10 == 0 {
            stage.news(News::Validation(i, 3.0));
        }
    }
    let now = |i: u8| RankNow {
        at: format!("backward layers.{i}"),
        percent: 60 + i,
        allocated: 123 << 20,
    };
    stage.news(News::Ranks((0..4).map(now).collect()));
    both("train_running", &mut stage);
    let norm = |i: u32| ParamNorm {
        name: format!("layers.{i}.attn.qkv.weight"),
        weight: 10.0 + f64::from(i),
        gradient: (i > 0).then(|| f64::from(i % 5) / 8.0),
    };
    stage.news(News::ParamNorms(20, (0..12).map(norm).collect()));
    both("train_norms", &mut stage);
    stage.keys("s");
    stage.run(step(RunKind::Exec, 0));
    assert_snapshot!("train_stopped_80x24", stage.screen(80, 24));
    stage.keys("x");
    stage.news(News::Failed(
        "rank 1, stream compute: kernel error: made up".into(),
    ));
    assert_snapshot!("train_failed_80x24", stage.screen(80, 24));
}

/// The progress of ranks in another process is unknown, and its messages may be longer than the
/// pane.
#[test]
fn training_elsewhere() {
    let mut stage = Stage::new();
    stage.keys("3x");
    stage.news(News::On("GPUs".into()));
    stage.news(News::RunStart(40));
    stage.news(News::Note("NCCL WARN a cable is loose".into()));
    assert_snapshot!("train_elsewhere_begins_80x24", stage.screen(80, 24));
    stage.news(News::On("4 x NVIDIA H200".into()));
    stage.news(News::Stepping);
    for i in 1..=25 {
        stage.news(news(i));
    }
    both("train_elsewhere", &mut stage);
    stage.keys("x");
    let more: Vec<String> = (1..30).map(|i| format!("  line {i}")).collect();
    stage.news(News::Failed(format!(
        "GPUs 0 to 63 are needed, one GPU per rank, but the driver shows 4: use fewer ranks\n{}\nX trains it on the CPU",
        more.join("\n")
    )));
    let screen = stage.screen(80, 24);
    assert!(screen.contains("… (e)"), "{screen}");
    stage.keys("e");
    assert_snapshot!("train_whole_80x24", stage.screen(80, 24));
    stage.keys("G");
    let screen = stage.screen(80, 24);
    assert!(screen.contains("X trains it on the CPU"), "{screen}");
    assert!(screen.contains("a cable is loose"), "{screen}");
    stage.keys("<esc>");
    assert!(stage.app.whole.is_none());
}

/// The first step may take minutes, so its number, the number of steps and its duration so far are
/// shown.
#[test]
fn the_step_that_runs_is_counted() {
    let mut stage = Stage::new();
    let ranks = |percent| {
        let now = RankNow {
            at: "forward root".into(),
            percent,
            allocated: 1,
        };
        News::Ranks(vec![now; 2])
    };
    let said = |stage: &mut Stage, at: u64| {
        stage.event(Event::Tick(Duration::from_secs(at)));
        let screen = stage.screen(80, 24);
        screen.lines().nth(2).unwrap().to_owned()
    };
    stage.event(Event::Tick(Duration::from_secs(10)));
    stage.keys("x");
    stage.news(News::RunStart(40));
    stage.news(ranks(1));
    let line = said(&mut stage, 14);
    assert!(
        line.contains("setting up   step 1 of 40 for 4.0 s"),
        "{line}"
    );
    stage.news(News::Stepping);
    let line = said(&mut stage, 16);
    assert!(line.contains("training   step 1 of 40 for 2.0 s"), "{line}");
    stage.news(news(1));
    let line = said(&mut stage, 16);
    assert!(line.contains("training   step 2 of 40   left"), "{line}");
    // Nothing runs after the last step.
    stage.news(news(40));
    let line = said(&mut stage, 19);
    assert!(line.contains("training   step 40 of 40   left"), "{line}");
    stage.news(News::Done);
    let line = said(&mut stage, 19);
    assert!(line.contains("✓ done   step 40 of 40"), "{line}");
}

#[test]
fn sweep() {
    let mut stage = Stage::new();
    stage.keys("4");
    both("sweep_empty", &mut stage);
    stage.keys("afsdp.prefetch_forward=[0, 1, 2]<enter>w");
    let keys = ["fsdp.prefetch_forward", "train.recompute"].map(str::to_owned);
    stage.news(News::Axes(keys.to_vec(), 6));
    let points = [
        (0, "0", "none", Ok(brief(1200.0, 60.0, "yes"))),
        (1, "0", "full", Ok(brief(1400.0, 40.0, "yes"))),
        (4, "2", "none", Ok(brief(1040.0, 62.0, "yes"))),
        (2, "1", "none", Ok(brief(1050.0, 61.0, "tight"))),
        (3, "1", "full", Ok(brief(1300.0, 145.0, "no"))),
    ];
    for (i, a, b, result) in points {
        stage.news(News::Point(i, vec![a.into(), b.into()], result));
    }
    let refused = Err("prefetch cannot be that".to_owned());
    stage.news(News::Point(5, vec!["2".into(), "full".into()], refused));
    both("sweep_running", &mut stage);
    stage.news(News::Done);
    // By step time, which is the third column after the order and the two axes.
    stage.keys("sssj");
    stage.keys("/fits=yes<enter>");
    both("sweep_sorted", &mut stage);
}

/// Only the form is synthetic; the texts of real comparisons are tested in `reports`.
fn comparison() -> Page {
    let cells = |cells: [&str; 4]| cells.map(str::to_owned);
    let mut why = Table::new("Why", &[]);
    why.notes.push(
        "Waiting for all_gather in backward: 12.1 ms in A, 3.0 ms in B, because nothing hid it."
            .into(),
    );
    let mut metrics = Table::new("Metrics", &["metric", ">A", ">B", ">change"]);
    metrics.row(Tone::Good, cells(["step ms", "1137.5", "1076.7", "-60.8"]));
    metrics.row(Tone::Bad, cells(["device GiB", "51.85", "52.25", "+0.40"]));
    metrics.row(Tone::Plain, cells(["MFU %", "37.5", "39.6", "+2.1"]));
    let mut long = Table::new("Wall time by unit, ms", &["of", ">A", ">B", ">change"]);
    for i in 0..32 {
        let name = format!("layers.{i}");
        long.row(Tone::Plain, cells([&name, "33.5", "31.7", "-1.8"]));
    }
    let series = |name: &str, by: f64| Series {
        name: name.into(),
        values: (1..=20).map(|i| by / f64::from(i) + 2.0).collect(),
    };
    Page {
        title: "A sim llama-tiny │ B exec llama-tiny".into(),
        verdict: Some((Tone::Good, "B is 5.3 % faster: 12.00 ms → 11.36 ms.".into())),
        tables: vec![why, metrics, long],
        losses: vec![series("A llama-tiny", 4.0), series("B llama-tiny", 3.0)],
    }
}

/// Returns a run with its name in the session.
fn called(number: u32, view: &Arc<RunView>) -> (String, Arc<RunView>) {
    (format!("#{number}"), Arc::clone(view))
}

/// Returns a run of this scenario with this prefetch.
fn with(name: &str, prefetch: &str) -> Arc<RunView> {
    let mut view = RunView::clone(&step(RunKind::Sim, 0));
    view.scenario.name = name.into();
    let settings = &mut view.scenario.settings;
    settings.insert("fsdp.prefetch_forward".into(), prefetch.into());
    view.scenario.overrides = vec![format!("fsdp.prefetch_forward={prefetch}")];
    Arc::new(view)
}

/// The title identifies the runs, and changed options come before their effects.
#[test]
fn comparisons_say_which_run_is_which() {
    let titles = |page: &Page| {
        page.tables
            .iter()
            .map(|t| t.title.clone())
            .collect::<Vec<_>>()
    };
    let two = judge::compare(&[called(3, &with("x", "1")), called(1, &with("x", "4"))]);
    assert_eq!(
        two.title,
        "x: A #3 sim, prefetch_forward=1 │ B #1 sim, prefetch_forward=4"
    );
    assert_eq!(titles(&two)[1..3], ["Options that differ", "Metrics"]);
    let others = judge::compare(&[called(1, &with("x", "1")), called(2, &with("y", "4"))]);
    assert_eq!(
        others.title,
        "A #1 sim x, prefetch_forward=1 │ B #2 sim y, prefetch_forward=4"
    );
    let runs: Vec<_> = (1..7)
        .map(|n| called(n, &with("x", &n.to_string())))
        .collect();
    let many = judge::compare(&runs);
    let last = &many.tables[0].rows[5].cells;
    assert_eq!(last[..], ["F", "#6", "sim", "x", "prefetch_forward=6"]);
    assert_eq!(titles(&many)[1], "Options that differ");
}

/// Two runs above each other keep their options even if one line is too narrow.
#[test]
fn both_runs_of_a_timeline_keep_their_options() {
    let mut stage = Stage::new();
    for prefetch in ["1", "4"] {
        stage.keys("1r");
        stage.run(with("llama-tiny", prefetch));
    }
    stage.keys("6m");
    let narrow = stage.screen(80, 24);
    let line = |n: usize| narrow.lines().nth(n).unwrap_or_default().to_owned();
    assert!(
        line(1).contains("llama-tiny: #1 predicted 11.36 ms [prefetch_forward=1]"),
        "{narrow}"
    );
    assert!(
        line(2).contains("llama-tiny: #2 predicted 11.36 ms [prefetch_forward=4]"),
        "{narrow}"
    );
    let words =
        "#1 predicted 11.36 ms [prefetch_forward=1] │ #2 predicted 11.36 ms [prefetch_forward=4]";
    assert!(stage.screen(160, 50).contains(words));
}

#[test]
fn comparisons_of_two_runs_and_of_many_have_their_tables() {
    let (a, b) = (step(RunKind::Sim, 0), step(RunKind::Exec, 20));
    let titles =
        |page: &Page| -> Vec<String> { page.tables.iter().map(|t| t.title.clone()).collect() };
    let two = judge::compare(&[called(1, &a), called(2, &b)]);
    assert_eq!(two.title, "llama-tiny: A #1 sim │ B #2 exec");
    for title in [
        "Why",
        "Metrics",
        "Exposed time by cause, ms",
        "Predicted against measured",
        "Worst predictions",
    ] {
        assert!(
            titles(&two).iter().any(|t| t == title),
            "{title}: {:?}",
            titles(&two)
        );
    }
    assert_eq!(two.losses.len(), 1);
    // A measurement is neither better nor worse than a prediction.
    let (tone, verdict) = two.verdict.clone().unwrap();
    assert_eq!(tone, Tone::Plain);
    assert!(verdict.contains("the prediction is "), "{verdict}");
    let many = judge::compare(&[
        called(1, &a),
        called(2, &b),
        called(4, &step(RunKind::Sim, 10)),
    ]);
    assert_eq!(titles(&many)[..2], ["Runs", "Metrics"]);
    let cells = many.tables[1].rows.iter().flat_map(|r| &r.cells);
    assert!(cells.into_iter().all(|c| !c.contains(['*', '◆'])));
    assert_eq!(many.tables[0].rows.len(), 3);
    // Predictions are ranked among each other, but not if they tie.
    let many = judge::compare(&[
        called(1, &a),
        called(2, &step(RunKind::Sim, 0)),
        called(4, &step(RunKind::Sim, 10)),
    ]);
    let title = "Metrics (* best of those that fit; within 0.5 % equal)";
    assert_eq!(titles(&many)[1], title);
}

/// Returns a result of a gate without a program.
fn judged() -> Judged {
    let text = "scenario = 'llama-tiny'\nset = ['fsdp.prefetch_forward=0']\npolicy = 'native'\nhardware = 'cpu'\n\
        world_size = 2\nprogram = { digest = '', outline = '' }\n\
        memory = { allocated = 1, reserved = 1, device = 1, persistent = 1, at = 'forward root' }\n\
        time = { step_ps = 1, host_ps = 1 }\ncheck = { errors = 0, warnings = 0 }\n";
    let baseline = Baseline::parse(format!("format = 1\n{text}"), "").unwrap();
    Judged {
        facts: baseline.facts,
        limits: Limits::new(&Gate::default(), &BTreeMap::new(), None),
        path: "baselines/llama-tiny.toml".into(),
        exists: true,
        changes: vec!["step time: 1.077 s to 1.138 s (limit ±0.5 %)".into()],
    }
}

/// A baseline is written only after a confirmation.
#[test]
fn a_baseline_is_confirmed() {
    let mut stage = Stage::new();
    stage.app.gate.folder = "baselines".into();
    stage.keys("7B");
    assert_eq!(stage.app.question, None, "there is nothing to write");
    stage.keys("b");
    let asked = |stage: &Stage| stage.effects.last().cloned();
    let Some(Effect::Start(_, Task::Gate(_, folder))) = asked(&stage) else {
        panic!("{:?}", asked(&stage));
    };
    assert_eq!(folder.to_str(), Some("baselines"));
    let found = Arc::new(judged());
    stage.news(News::Gated(Arc::default(), Arc::clone(&found)));
    stage.news(News::Done);
    let before = stage.effects.len();
    // Keys that have a meaning elsewhere have none now.
    stage.keys("B1qb<esc>Bn");
    assert_eq!(stage.effects.len(), before);
    assert_eq!(stage.app.question, None);
    stage.keys("By");
    let Some(Effect::Start(_, Task::Bless(task))) = asked(&stage) else {
        panic!("{:?}", asked(&stage));
    };
    assert!(Arc::ptr_eq(&task, &found));
    // Another folder gates again.
    stage.keys("f<ctrl-u>other<enter>");
    let Some(Effect::Start(_, Task::Gate(_, folder))) = asked(&stage) else {
        panic!("{:?}", asked(&stage));
    };
    assert_eq!(folder.to_str(), Some("other"));
}

/// A gate without a baseline, the baseline that it becomes, and the pass against it, with real
/// files but without a terminal.
#[test]
fn a_gate_becomes_a_baseline() {
    let folder = tempfile::tempdir().unwrap();
    let setup = Setup {
        path: "small-linear".into(),
        overrides: vec!["train.steps=3".into()],
    };
    let profiles = Profiles::default();
    let gate = || {
        judge::gate(&setup, folder.path(), &profiles, &Stop::default())
            .unwrap()
            .unwrap()
    };
    let (page, first) = gate();
    let (tone, words) = page.verdict.as_ref().unwrap();
    assert!(
        *tone == Tone::Plain && words.contains("no baseline"),
        "{words}"
    );
    assert_eq!(page.tables.len(), 1);
    assert!(!first.exists);
    // Exceeding a budget fails, whatever a baseline would contain.
    let over = Setup {
        overrides: vec!["gate.max_memory=1KiB".into()],
        ..setup.clone()
    };
    let (page, _) = judge::gate(&over, folder.path(), &profiles, &Stop::default())
        .unwrap()
        .unwrap();
    let (tone, words) = page.verdict.as_ref().unwrap();
    assert!(
        *tone == Tone::Bad && words.ends_with("it fails without one"),
        "{words}"
    );
    let titles: Vec<&str> = page.tables.iter().map(|t| t.title.as_str()).collect();
    assert_eq!(
        titles,
        [
            "It would hold",
            "Comparisons",
            "REGRESSION: budget, reserved",
            "REGRESSION: budget, reserved and measured",
        ]
    );
    let (page, second) = judge::bless(&first).unwrap();
    assert_eq!(page.verdict.as_ref().unwrap().0, Tone::Good);
    assert!(second.exists && second.changes.is_empty());
    let (page, _) = gate();
    assert!(page.verdict.as_ref().unwrap().1.starts_with("✓ passes"));
}

#[test]
fn runs_compare_and_gate() {
    let mut stage = Stage::new();
    stage.app.gate.folder = "baselines".into();
    stage.keys("5");
    both("runs_empty", &mut stage);
    stage.keys("1r");
    stage.run(step(RunKind::Sim, 0));
    stage.keys("1r");
    stage.run(step(RunKind::Sim, 20));
    stage.keys("5 ");
    both("runs", &mut stage);
    stage.keys("6");
    both("compare_empty", &mut stage);
    stage.keys("c");
    stage.news(News::Compared(Arc::new(comparison())));
    stage.news(News::Done);
    both("compare", &mut stage);
    stage.keys("7");
    both("gate_empty", &mut stage);
    stage.keys("b");
    let mut table = Table::new("Comparisons", &["metric", "outcome", ">baseline", ">now"]);
    let cells = |cells: [&str; 4]| cells.map(str::to_owned);
    table.row(
        Tone::Good,
        cells(["peak allocated", "pass", "52.1 GiB", "52.1 GiB"]),
    );
    table.row(
        Tone::Bad,
        cells(["step time", "REGRESSION", "1.077 s", "1.138 s"]),
    );
    table
        .notes
        .push("The step takes longer than its limit allows.".into());
    let page = Page {
        title: "llama-tiny".into(),
        verdict: Some((Tone::Bad, "✗ 1 of 2 comparisons fails".into())),
        tables: vec![table],
        ..Page::default()
    };
    stage.news(News::Gated(Arc::new(page), Arc::new(judged())));
    both("gate_failed", &mut stage);
    stage.keys("B");
    both("gate_confirm", &mut stage);
}

#[test]
fn help_and_small_terminals() {
    let mut stage = Stage::new();
    stage.keys("?");
    both("help", &mut stage);
    stage.keys("/critical");
    assert_snapshot!("help_search_80x24", stage.screen(80, 24));
    stage.keys("<enter><esc>");
    assert_snapshot!("too_small_60x10", stage.screen(60, 10));
    // Drawing never fails on a small screen.
    for width in 1..30 {
        for height in 1..6 {
            stage.screen(width, height);
        }
    }
}

/// The verdict, the changes that help, those that do not, and the reasons if there is room.
#[test]
fn what_if() {
    let mut stage = Stage::new();
    stage.keys("8");
    assert_snapshot!("whatif_running_80x24", stage.screen(80, 24));
    stage.news(News::Explained(Arc::new(explained(&stage))));
    stage.news(News::Done);
    for (width, height) in [(80, 24), (120, 40), (160, 50)] {
        assert_snapshot!(
            format!("whatif_{width}x{height}"),
            stage.screen(width, height)
        );
    }
    stage.keys("aG");
    assert_snapshot!("whatif_all_80x24", stage.screen(80, 24));
    stage.keys("e");
    assert_snapshot!("whatif_whole_80x24", stage.screen(80, 24));
}

/// The verdict, what takes up the memory, and the keys of a configuration.
#[test]
fn fit() {
    let mut stage = Stage::new();
    stage.keys("9");
    assert_snapshot!("fit_running_80x24", stage.screen(80, 24));
    let mut memory = Table::new(
        "Memory of a GPU at the peak: 61.31 GiB of 79.18 GiB",
        &["memory", ">bytes", ">share", ""],
    );
    for (name, bytes, share, bar) in [
        ("activation", "25.16 GiB", "31.8 %", "██████████"),
        ("optimizer_state", "7.48 GiB", "9.4 %", "███"),
        ("free", "17.87 GiB", "22.6 %", "███████"),
    ] {
        memory.row(Tone::Plain, [name, bytes, share, bar].map(str::to_owned));
    }
    let mut keys = Table::new(
        "Keys of sft.yaml: 2 used, 0 assumed, 1 without counterpart",
        &[">line", "key", "value", "status", "scenario"],
    );
    for (line, key, value, status, scenario) in [
        ("2", "sequence_len", "8192", "used", "train.seq_len = 8192"),
        (
            "3",
            "micro_batch_size",
            "2",
            "used",
            "train.micro_batch = 2",
        ),
    ] {
        let cells = [line, key, value, status, scenario];
        keys.row(Tone::Plain, cells.map(str::to_owned));
    }
    keys.notes = vec!["logging, not part of a step: wandb_project".to_owned()];
    let said = |title: &str, note: &str| Table {
        notes: vec![note.to_owned()],
        ..Table::new(title, &[])
    };
    let page = Page {
        title: "sft".to_owned(),
        verdict: Some((
            Tone::Good,
            "fits · ~982 ms ± 2.2 % (estimated: from data sheets) · 59.31 of 79.18 GiB reserved"
                .into(),
        )),
        tables: vec![
            said(
                "Why",
                "Compute-bound: the compute stream is busy 98 % of the step.",
            ),
            said(
                "Next",
                "o searches for the best settings; i predicts what single changes would do",
            ),
            memory,
            keys,
        ],
        losses: Vec::new(),
    };
    let setup = stage.app.setup().unwrap();
    stage.news(News::Fitted(setup, Arc::new(page)));
    stage.news(News::Done);
    for (width, height) in [(80, 24), (120, 40)] {
        assert_snapshot!(format!("fit_{width}x{height}"), stage.screen(width, height));
    }
}

/// The best settings, the front and the reasons; before that, the progress of the search.
#[test]
fn tune() {
    let mut stage = Stage::new();
    stage.keys("0");
    assert_snapshot!("tune_empty_80x24", stage.screen(80, 24));
    stage.keys("o");
    let text = "120 predicted, best 951.2 ms, 57.00 GiB";
    stage.news(News::Searched(text.into()));
    assert_snapshot!("tune_running_80x24", stage.screen(80, 24));
    stage.news(News::Explained(Arc::new(tuned(&stage))));
    stage.news(News::Done);
    for (width, height) in [(80, 24), (120, 40)] {
        assert_snapshot!(
            format!("tune_{width}x{height}"),
            stage.screen(width, height)
        );
    }
    stage.keys("e");
    assert_snapshot!("tune_whole_80x24", stage.screen(80, 24));
}

/// Sizes between the smallest and the largest.
#[test]
fn scenarios_at_a_usual_size() {
    let mut stage = Stage::new();
    stage.app.scenarios.option_filter = "prefetch".into();
    assert_snapshot!("scenarios_120x40", stage.screen(120, 40));
    stage.keys("r");
    stage.run(step(RunKind::Sim, 0));
    assert_snapshot!("timeline_120x40", stage.screen(120, 40));
}

/// The text on an option is shown in full: next to the list if it fits, or else by a key.
#[test]
fn help_on_options_is_never_cut_off() {
    let mut stage = Stage::new();
    stage.keys("<tab>/prefetch_forward<enter>");
    let info = options::all()
        .iter()
        .position(|i| options::path(i) == "fsdp.prefetch_forward")
        .unwrap();
    let info = options::all()[info];
    let flat = |screen: &str| -> String {
        let inner = screen.lines().map(|l| l.trim_matches(['"', '│', ' ']));
        let words = inner.flat_map(|l| l.split('│').next_back().unwrap().split_whitespace());
        words.collect::<Vec<_>>().join(" ")
    };
    let takes = format!("takes {}", info.expected());
    // At these widths, it covers everything.
    for (width, height) in [(80, 24), (100, 40)] {
        stage.keys("e");
        let screen = flat(&stage.screen(width, height));
        stage.keys("e");
        assert!(screen.contains(info.doc), "{screen}");
        assert!(screen.contains(&takes), "{takes}: {screen}");
    }
}

/// Without colours, no part of any screen has one.
#[test]
fn mono_has_no_colour() {
    let mut stage = Stage::new();
    stage.app.theme = Theme::new(Name::Safe, Depth::None);
    stage.keys("r");
    stage.run(step(RunKind::Sim, 0));
    for view in "1234567890?".chars() {
        stage.keys(&view.to_string());
        let terminal = stage.terminal(120, 40);
        for cell in terminal.backend().buffer().content() {
            assert_eq!(
                (cell.fg, cell.bg),
                (Color::Reset, Color::Reset),
                "view {view}"
            );
        }
    }
}

/// Every view can be drawn at every size with every theme.
#[test]
fn every_size_and_theme_is_drawn() {
    let mut stage = Stage::new();
    stage.keys("r");
    stage.run(step(RunKind::Sim, 0));
    stage.keys("3x");
    stage.run(step(RunKind::Exec, 30));
    for name in Name::ALL {
        stage.app.theme = Theme::new(name, Depth::Palette);
        for (width, height) in [
            (80, 24),
            (81, 25),
            (99, 30),
            (100, 31),
            (120, 36),
            (200, 60),
            (400, 100),
        ] {
            for view in "1234567890".chars() {
                stage.keys(&view.to_string());
                let screen = stage.screen(width, height);
                assert_eq!(screen.lines().count(), usize::from(height));
            }
        }
    }
}
