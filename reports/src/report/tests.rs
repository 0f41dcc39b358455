//! Tests of reports on synthetic runs.

use super::*;
use crate::compare::Side;
use crate::stats::Options;
use crate::testing;
use shardlab_plan::config::RowShortage;
use shardlab_plan::record::RunKind;
use shardlab_plan::units::{Bytes, Picos};

fn item(label: &str, spans: u32) -> Item {
    Item {
        label: label.to_owned(),
        view: testing::view(spans),
        axes: vec![],
    }
}

/// Returns a prediction and a measurement of one program, and a third run with another option.
fn items() -> Vec<Item> {
    let mut sim = item("predicted", 400);
    sim.view.run.kind = RunKind::Sim;
    sim.view.run.losses.clear();
    let mut exec = item("<measured> & kept", 400);
    exec.view.run.kind = RunKind::Exec;
    let mut other = item("predicted", 400);
    other.view.run.kind = RunKind::Sim;
    other
        .view
        .scenario
        .settings
        .insert("fsdp.prefetch_forward".into(), "7".into());
    vec![sim, exec, other]
}

#[test]
fn every_part_is_there() {
    let report = Report::new(None, &items());
    let ids: Vec<&str> = report.sections.iter().map(|s| s.id).collect();
    for id in [
        "summary",
        "step-time",
        "streams",
        "exposed",
        "memory",
        "prediction",
        "convergence",
        "differences",
        "provenance",
    ] {
        assert!(ids.contains(&id), "{id}: {ids:?}");
    }
    assert_eq!(report.title, "predicted and 2 others");
    // Equal labels are numbered.
    let text = markdown(&report, |_| None);
    assert!(text.contains("predicted (2)"), "{text}");
}

/// Reports of mixtures of experts describe how experts are divided, and list collectives that carry
/// tokens separately from those of weights.
#[test]
fn experts_have_a_section() {
    use crate::view::{Exchange, ExpertsView};
    use shardlab_plan::ir::CollectiveKind;
    let mut with = item("divided", 400);
    let gathers = with
        .view
        .run
        .collectives
        .get_mut(&CollectiveKind::AllGather);
    gathers.expect("recorded").count = 5;
    let exchange = Exchange {
        count: 1,
        bytes: 3 << 20,
        busy_ms: 1.25,
        exposed_ms: 0.5,
    };
    with.view.experts = Some(ExpertsView {
        experts: 128,
        experts_per_rank: 16,
        top_k: 8,
        ep: 8,
        dispatcher: Some("gather".to_owned()),
        routing: "seeded".to_owned(),
        imbalance: 1.5,
        rows_reserved: 262_144,
        rows_expected: 49_152,
        row_shortage: Some(RowShortage {
            layer: 3,
            wanted: 300_000,
            reserved: 262_144,
            layers: 2,
            factor: 1.15,
            share: 0.07,
            drop: true,
        }),
        dispatch_ms: 1.25,
        combine_ms: 2.5,
        matmul_ms: 40.0,
        network_bytes: 0,
        exchanges: [(CollectiveKind::AllGather, exchange)].into(),
    });
    let report = Report::new(None, &[with, item("dense", 400)]);
    let text = markdown(&report, |_| None);
    let page = html(&report);
    for part in [
        "16 of 128",
        "gather",
        "seeded",
        "262144",
        "49152",
        "7.0 %",
        "1.250",
        "40.000",
    ] {
        assert!(text.contains(part) && page.contains(part), "{part}: {text}");
    }
    assert!(
        text.contains("| A | 8 | 16 of 128 | 8 | gather | seeded | 1.50 |"),
        "{text}"
    );
    let apart = text
        .lines()
        .find(|l| l.contains("gather: tokens of experts"));
    let apart = apart.unwrap_or_else(|| panic!("{text}"));
    assert!(
        apart.contains("| A | 1 |") && apart.contains("| 1.250 | 0.500 |"),
        "{apart}"
    );
    // Others have neither.
    let none = markdown(&Report::new(None, &[item("dense", 400)]), |_| None);
    assert!(!none.contains("Experts") && !none.contains("tokens of experts"));
}

#[test]
fn two_runs_are_explained_and_a_sweep_has_its_scenario_for_a_title() {
    let two: Vec<Item> = items().into_iter().step_by(2).collect();
    let report = Report::new(None, &two);
    let text = markdown(&report, |_| None);
    assert!(text.contains("## Why they differ"), "{text}");
    assert!(text.contains("fsdp.prefetch\\_forward: 1 → 7."), "{text}");
    let mut sweep = two;
    for (i, item) in sweep.iter_mut().enumerate() {
        item.axes = vec![("fsdp.prefetch_forward".into(), i.to_string())];
    }
    let name = sweep[0].view.scenario.name.clone();
    let title = Report::new(None, &sweep).title;
    assert_eq!(title, format!("{name}: 2 points of fsdp.prefetch_forward"));
}

#[test]
fn commands_are_words_for_a_shell() {
    let mut one = item("one", 40);
    one.view.scenario.source = "./my runs/it's.toml".into();
    one.view.scenario.overrides = vec!["train.lr=0.1".into(), "mesh.hardware='cpu'".into()];
    let mut old = item("old", 40);
    old.view.scenario.source.clear();
    old.view.scenario.overrides.clear();
    let text = markdown(&Report::new(None, &[one, old]), |_| None);
    for command in [
        r"shardlab sim './my runs/it'\''s.toml' --set train.lr=0.1 --set 'mesh.hardware='\''cpu'\'''",
        "shardlab sim synthetic\n",
    ] {
        assert!(text.contains(command), "{command}\n{text}");
    }
}

/// The report and `compare` give the same verdict on the same runs: a measured one, and a longer
/// one with jitter.
#[test]
fn step_times_are_judged_as_in_a_comparison() {
    let measured = |label: &str, steps: u64| {
        let mut item = item(label, 40);
        item.view.run.kind = RunKind::Exec;
        let ms = |i: u64| Picos(1_000_000_000 * (100 + (i / 5) % 7 + steps % 3));
        item.view.run.step_samples = (0..steps).map(ms).collect();
        item
    };
    let mut items = [measured("a", 9), measured("b", 100)];
    let jittered = &mut items[1].view.run;
    jittered.kind = RunKind::Sim;
    jittered.environment.insert("jitter".into(), "0.02".into());
    let [a, b] = [0, 1].map(|i| Side::new(&items[i].label, &items[i].view));
    let pair = crate::compare::pair(a, b, &Options::default());
    let sentence = pair.verdict().unwrap();
    let text = markdown(&Report::new(None, &items), |_| None);
    assert!(text.contains(sentence), "{sentence}\n{text}");
}

#[test]
fn html_is_whole_and_fetches_nothing() {
    let report = Report::new(Some("A <report>"), &items());
    let page = html(&report);
    assert_eq!(page, html(&Report::new(Some("A <report>"), &items())));
    assert!(page.contains("<title>A &lt;report&gt;</title>"));
    assert!(page.contains("&lt;measured&gt; &amp; kept") && !page.contains("<measured>"));
    // Addresses occur only as names of XML namespaces.
    let rest = page.replace("http://www.w3.org/2000/svg", "");
    for word in ["http:", "https:", "src=", "@import", "url("] {
        assert!(!rest.contains(word), "{word}");
    }
    // Every drawing has a description and a unique name.
    let drawings = page.matches("<svg viewBox").count();
    assert_eq!(drawings, report.plots().len());
    assert_eq!(
        page.matches("role=\"img\" aria-labelledby=").count(),
        drawings
    );
    assert_eq!(page.matches("<title id=").count(), drawings);
    let mut ids: Vec<&str> = page
        .split(" id=\"")
        .skip(1)
        .filter_map(|t| t.split('"').next())
        .collect();
    let all = ids.len();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), all);
    // Colors are variables of the page.
    for svg in report.plots().iter().map(|p| &p.svg) {
        assert!(!svg.contains("=\"#"), "{svg}");
    }
    // Elements are closed in order.
    balanced(&page);
}

/// Checks that the elements that the renderer writes are closed in the reverse order of their
/// start.
fn balanced(page: &str) {
    let mut open: Vec<&str> = Vec::new();
    let mut rest = page;
    while let Some(at) = rest.find('<') {
        rest = &rest[at + 1..];
        if rest.starts_with("!DOCTYPE") {
            continue;
        }
        let end = rest.find('>').unwrap();
        let tag = &rest[..end];
        let name = tag
            .trim_start_matches('/')
            .split([' ', '\n', '/'])
            .next()
            .unwrap();
        if tag.starts_with('/') {
            assert_eq!(open.pop(), Some(name), "{tag}");
        } else if !tag.ends_with('/') && !["meta", "br"].contains(&name) {
            open.push(name);
        }
        rest = &rest[end..];
        if ["script", "style"].contains(&name) && !tag.starts_with('/') {
            rest = &rest[rest.find(&format!("</{name}>")).unwrap()..];
        }
    }
    assert!(open.is_empty(), "{open:?}");
}

#[test]
fn markdown_has_the_tables_and_links_of_drawings() {
    let report = Report::new(None, &items());
    let text = markdown(&report, |p| Some(format!("plots/{}.png", p.name)));
    assert!(text.contains("![Step time](<plots/steps.png>)"), "{text}");
    assert!(text.contains("| fsdp.prefetch\\_forward |"), "{text}");
    assert!(text.contains("&lt;measured&gt; & kept"), "{text}");
}

#[test]
fn drawings_stand_alone_without_variables() {
    for plot in Report::new(None, &items()).plots() {
        let svg = plot.standalone();
        assert!(!svg.contains("var("), "{}", plot.name);
        assert!(svg.contains("xmlns="), "{}", plot.name);
    }
}

/// Ten runs of a full-size step stay below five megabytes.
#[test]
fn ten_large_runs_fit_a_mail() {
    let items: Vec<Item> = (0..10).map(|i| item(&format!("run {i}"), 60_000)).collect();
    let page = html(&Report::new(None, &items));
    assert!(page.len() < 5_000_000, "{}", page.len());
}

#[test]
fn runs_that_lack_things_are_reported_without_them() {
    let mut bare = item("bare", 0);
    let run = &mut bare.view.run;
    run.step_samples.clear();
    run.losses = vec![f64::NAN];
    run.grad_norms.clear();
    run.gaps.clear();
    run.exposed.clear();
    run.collectives.clear();
    run.memory.timeline.clear();
    run.memory.by_role.clear();
    run.environment.clear();
    let page = html(&Report::new(None, &[bare]));
    balanced(&page);
    assert!(page.contains("– ms per step"));
}

#[test]
fn a_sweep_becomes_a_map() {
    let items: Vec<Item> = [(0, 1), (0, 2), (1, 1), (1, 2)]
        .into_iter()
        .map(|(a, b)| {
            let mut i = item(&format!("{a}/{b}"), 10);
            let settings = &mut i.view.scenario.settings;
            settings.insert("fsdp.prefetch_forward".into(), a.to_string());
            settings.insert("train.micro_batch".into(), b.to_string());
            i
        })
        .collect();
    let report = Report::new(None, &items);
    let sweep = report.sections.iter().find(|s| s.id == "sweep").unwrap();
    let Block::Plot(plot) = &sweep.blocks[0] else {
        panic!("a drawing")
    };
    assert_eq!(
        plot.title,
        "Step time by fsdp.prefetch_forward and train.micro_batch"
    );
}

/// The axes of a sweep take precedence over other changed options.
#[test]
fn a_map_follows_the_axes_it_is_given() {
    let items: Vec<Item> = ["native", "fsdp2", "megatron"]
        .into_iter()
        .map(|policy| {
            let mut i = item(policy, 10);
            for key in ["fsdp.policy", "fsdp.allocator", "fsdp.units"] {
                i.view.scenario.settings.insert(key.into(), policy.into());
            }
            i.axes = vec![("fsdp.policy".into(), policy.into())];
            i
        })
        .collect();
    let report = Report::new(None, &items);
    let plot = report
        .plots()
        .into_iter()
        .find(|p| p.name == "heat")
        .unwrap();
    assert_eq!(plot.title, "Step time by fsdp.policy");
}

/// Returns four runs whose steps take one millisecond per thousand tokens; the last one is faster.
fn batches() -> Vec<Item> {
    [(1u64, 10_000u64), (2, 20_000), (4, 40_000), (8, 64_000)]
        .into_iter()
        .map(|(batch, us)| {
            let mut i = item(&format!("micro_batch={batch}"), 10);
            i.view.run.tokens = 1000 * batch;
            i.view.run.step_samples = vec![Picos(us * 1_000_000)];
            i.axes = vec![("train.micro_batch".into(), batch.to_string())];
            i
        })
        .collect()
}

/// Returns a sweep over three axes. A step takes 100 ms, less 10 for each prefetch, 1 for each
/// unit, and an amount without `recompute`. Everything fits with `recompute`.
fn cube() -> Vec<Item> {
    let mut all = Vec::new();
    for prefetch in 0..3u64 {
        for units in 0..2u64 {
            for recompute in [false, true] {
                let label =
                    format!("prefetch_forward={prefetch} units={units} recompute={recompute}");
                let mut i = item(&label, 10);
                let ms = 100 - 10 * prefetch - units + 5 * u64::from(recompute);
                i.view.run.step_samples = vec![Picos(ms * 1_000_000_000)];
                // Without recompute, the largest prefetch does not fit.
                let fits = recompute || prefetch < 2;
                let memory = &mut i.view.run.memory;
                memory.capacity = Some(Bytes(memory.peak_device.0 - u64::from(!fits)));
                i.axes = [
                    ("fsdp.prefetch_forward", prefetch.to_string()),
                    ("fsdp.units", units.to_string()),
                    ("train.recompute", recompute.to_string()),
                ]
                .map(|(k, v)| (k.to_owned(), v))
                .into();
                all.push(i);
            }
        }
    }
    all
}

/// A large sweep shows its best points that fit, and has one column per axis.
#[test]
fn a_sweep_of_three_axes_shows_the_best_that_fit() {
    let items = cube();
    let report = Report::new(None, &items);
    let summary = &report.sections[0];
    let cards = summary.blocks.iter().find_map(|b| match b {
        Block::Cards(cards) => Some(cards),
        _ => None,
    });
    let heads: Vec<(&str, &str)> = cards
        .unwrap()
        .iter()
        .map(|c| (c.title.as_str(), c.head.as_str()))
        .collect();
    let best = "Best that fits: prefetch_forward=2 units=1 recompute=true";
    assert_eq!(heads, [(best, "84.00 ms per step")]);
    // In milliseconds: with recompute, 2 and 3 take 84 and 85, then 89, 90 and 94, 95. Without
    // recompute they take 79 and 80, and do not fit.
    let plots = report.plots();
    let titles = plots.iter().map(|p| p.title.as_str());
    let drawn: Vec<&str> = titles
        .filter_map(|t| t.strip_prefix("Streams and memory of one step: "))
        .collect();
    let expected = [
        "prefetch_forward=2 units=1 recompute=true",
        "prefetch_forward=2 units=0 recompute=true",
        "prefetch_forward=1 units=1 recompute=false",
        "prefetch_forward=1 units=0 recompute=false",
        "prefetch_forward=1 units=1 recompute=true",
        "prefetch_forward=1 units=0 recompute=true",
    ];
    assert_eq!(drawn, expected);
    let mut tables = summary.blocks.iter().filter_map(|b| match b {
        Block::Table(t) => Some(t),
        _ => None,
    });
    let table = tables.next_back().unwrap();
    assert_eq!(
        table.head[..4],
        ["prefetch_forward", "units", "recompute", "kind"]
    );
    assert_eq!(table.rows[3][..3], ["0", "1", "true"]);
    assert_eq!(table.rows.len(), 12);
    // The map has two axes, at the best fitting value of the third.
    let plot = map(&items);
    assert_eq!(
        plot.title,
        "Step time by fsdp.prefetch_forward and fsdp.units"
    );
    assert_eq!(
        plot.description,
        "from 84 to 100 ms per step; the best is 84 ms per step at fsdp.prefetch_forward=2, fsdp.units=1"
    );
    let text = markdown(&report, |_| None);
    for words in [
        "Each cell is the best over train.recompute, among the points that fit where any does",
        "the best of all is prefetch\\_forward=2 units=1 recompute=true.",
        "Details for the 6 best of 12 points by step time, among those that fit",
    ] {
        assert!(text.contains(words), "{words}\n{text}");
    }
    // Sentences compare with the best run.
    assert!(
        text.contains("is 1.2 % slower: 84.00 ms → 85.00 ms."),
        "{text}"
    );
}

/// A small sweep is shown in full, in the order of its axes.
#[test]
fn a_small_sweep_is_shown_in_its_order() {
    let text = markdown(&Report::new(None, &batches()), |_| None);
    assert!(!text.contains("Details for the"), "{text}");
    let rows = ["| 1 |", "| 2 |", "| 4 |", "| 8 |"].map(|row| text.find(row));
    assert!(rows.is_sorted() && rows[0].is_some(), "{rows:?} {text}");
}

fn map(items: &[Item]) -> Plot {
    let report = Report::new(None, items);
    let found = report.plots().into_iter().find(|p| p.name == "heat");
    found.expect("a map").clone()
}

/// The shortest step has the fewest tokens, so tokens per second determine the best.
#[test]
fn a_map_of_steps_that_differ_in_tokens_goes_by_tokens_a_second() {
    let mut items = batches();
    let plot = map(&items);
    assert_eq!(plot.title, "Throughput by train.micro_batch");
    assert_eq!(
        plot.description,
        "from 100,000 to 125,000 tokens/s/GPU; the best is 125,000 tokens/s/GPU at train.micro_batch=8"
    );
    // With equal tokens, the shortest step is the best.
    for i in &mut items {
        i.view.run.tokens = 1000;
    }
    let plot = map(&items);
    assert_eq!(plot.title, "Step time by train.micro_batch");
    assert_eq!(
        plot.description,
        "from 10 to 64 ms per step; the best is 10 ms per step at train.micro_batch=1"
    );
}

/// A point that exceeds the device's memory is never recommended.
#[test]
fn the_best_of_a_map_fits_the_device() {
    let mut items = batches();
    let memory = &mut items[3].view.run.memory;
    memory.capacity = Some(Bytes(memory.peak_device.0 - 1));
    for i in &mut items[..3] {
        i.view.run.step_samples[0].0 += i.view.run.tokens * 1_000_000;
    }
    items[1].view.run.step_samples[0].0 -= 1_000_000_000;
    let plot = map(&items);
    assert_eq!(
        plot.description,
        "from 90,909 to 125,000 tokens/s/GPU; the best that fits is 95,238 tokens/s/GPU at train.micro_batch=2; \
         1 does not fit the device"
    );
    assert!(plot.svg.contains("no fit"), "{}", plot.svg);
    for i in &mut items {
        i.view.run.memory.capacity = Some(Bytes(1));
    }
    let words = map(&items).description;
    assert!(
        words.ends_with("tokens/s/GPU; none fits the device"),
        "{words}"
    );
}

/// Stars follow the rules of the map: steps with different work are not compared, and only runs
/// that fit are marked.
#[test]
fn stars_are_for_runs_that_fit_and_for_numbers_that_compare() {
    let mut items = batches();
    let memory = &mut items[3].view.run.memory;
    memory.capacity = Some(Bytes(memory.peak_device.0 - 1));
    let starred = |items: &[Item]| -> Vec<(String, String)> {
        let report = Report::new(None, items);
        let found = report.sections[0].blocks.iter().find_map(|b| match b {
            Block::Table(t) => Some(t.clone()),
            _ => None,
        });
        let table = found.expect("a table");
        let mut all = Vec::new();
        for row in &table.rows {
            for (head, cell) in table.head.iter().zip(row).filter(|(_, c)| c.contains('★')) {
                all.push((row[0].clone(), format!("{head} {cell}")));
            }
        }
        all.retain(|(_, cell)| cell.contains(" ms") || cell.contains("tokens"));
        all
    };
    // The three runs that fit take a millisecond per hundred tokens, so none is the best.
    assert_eq!(starred(&items), []);
    for i in &mut items {
        i.view.run.tokens = 1000;
    }
    let starred = starred(&items);
    assert!(
        starred.contains(&("1".into(), ">step ms 10.00 ★".into())),
        "{starred:?}"
    );
}

#[test]
fn step_times_of_different_tokens_are_put_in_relation() {
    let page = markdown(&Report::new(None, &batches()[2..]), |_| None);
    // 40 ms for 4000 tokens, 64 ms for 8000.
    let words = "Throughput: B +25.0 % (tokens per rank and step: 4000 in A, 8000 in B).";
    assert!(page.contains(words), "{page}");
    let mut same = batches();
    same.truncate(1);
    same.push(same[0].clone());
    let page = markdown(&Report::new(None, &same), |_| None);
    assert!(!page.contains("Throughput:"), "{page}");
}

/// A model of images has no tokens, in sentences, tables and maps.
#[test]
fn throughput_uses_the_models_own_unit() {
    let mut images = batches();
    for item in &mut images {
        let settings = &mut item.view.scenario.settings;
        settings.insert("model.family".into(), "cnn".into());
    }
    for page in
        [&images[..], &images[2..]].map(|items| markdown(&Report::new(None, items), |_| None))
    {
        assert!(page.contains("images/s/GPU"), "{page}");
        assert!(!page.contains("token"), "{page}");
    }
    let pair = markdown(&Report::new(None, &images[2..]), |_| None);
    assert!(
        pair.contains("Throughput: B +25.0 % (images per rank and step: "),
        "{pair}"
    );
}

fn cards(report: &Report) -> &[Card] {
    let found = report.sections[0].blocks.iter().find_map(|b| match b {
        Block::Cards(cards) => Some(cards.as_slice()),
        _ => None,
    });
    found.expect("cards")
}

/// With two runs, the second card shows how it differs, and whether the difference is an
/// improvement.
#[test]
fn the_second_card_has_changes() {
    let mut two: Vec<Item> = items().into_iter().step_by(2).collect();
    for item in &mut two {
        item.view.run.step_samples = vec![Picos(100_000_000_000)];
    }
    two[1].view.run.step_samples = vec![Picos(90_000_000_000)];
    two[1].view.run.memory.peak_reserved = Bytes(5 << 20);
    let report = Report::new(None, &two);
    let [a, b] = cards(&report) else {
        panic!("two cards")
    };
    assert!(a.title.starts_with("A: ") && b.title.starts_with("B: "));
    assert!(a.change.is_none() && a.facts.iter().all(|f| f.change.is_none()));
    let change = |name: &str| b.facts.iter().find(|f| f.name == name)?.change.clone();
    let is = |by: &str, is_better| {
        Some(Change {
            by: by.into(),
            is_better,
        })
    };
    assert_eq!(b.change, is("-10.0 %", Some(true)));
    // 4 MiB and 5 MiB.
    assert_eq!(change("reserved"), is("+25.0 %", Some(false)));
    assert_eq!(change("allocated"), is("no change", None));
    assert_eq!(change("tokens/s/GPU"), is("+11.1 %", Some(true)));
    let text = markdown(&report, |_| None);
    assert!(
        text.contains("- reserved: 5.0 MiB (+25.0 % worse)"),
        "{text}"
    );
    assert!(html(&report).contains("<span class=\"change good\">-10.0 % better</span>"));
    // Sentences and tables call them A and B.
    assert!(text.contains("| cause | A | B |"), "{text}");
}

/// A prediction is not better or worse than a measurement, only different.
#[test]
fn predictions_and_measurements_are_not_ranked() {
    let mut two: Vec<Item> = items().into_iter().take(2).collect();
    two[1].view.run.step_samples = vec![Picos(1); 9];
    let report = Report::new(None, &two);
    let [_, b] = cards(&report) else {
        panic!("two cards")
    };
    let changes = b.facts.iter().filter_map(|f| f.change.as_ref());
    let mut changes = changes.chain(&b.change);
    assert!(changes.all(|c| c.is_better.is_none()));
    assert!(!markdown(&report, |_| None).contains('★'));
}

/// The header contains the basis of the numbers, once if it is the same for all runs.
#[test]
fn the_header_states_the_basis() {
    let all = items();
    let same = Report::new(None, &[all[0].clone(), all[2].clone()]);
    assert_eq!(
        same.about,
        ["Predicted for 4 x h200-nvlink; basis and error unknown."]
    );
    let other = Report::new(None, &all[..2]);
    assert_eq!(
        other.about,
        [
            "A: Predicted for 4 x h200-nvlink; basis and error unknown.",
            "B: Measured run on 4 x h200-nvlink."
        ]
    );
    assert!(html(&other).contains("<p class=\"about\">B: Measured run on 4 x h200-nvlink.</p>"));
}

/// All timelines of a page have the same scale.
#[test]
fn timelines_share_a_scale() {
    let mut two = [item("a", 400), item("b", 400)];
    let run = &mut two[1].view.run;
    run.recorded_to = Picos(2 * run.recorded_to.0);
    let length = crate::plots::timeline::length(&two[1].view);
    let report = Report::new(None, &two);
    let blocks = report.sections.iter().flat_map(|s| &s.blocks);
    let mut data = blocks.filter_map(|b| match b {
        Block::Timeline(t) => Some(&t.data),
        _ => None,
    });
    assert!(data.all(|d| d.starts_with(&format!("{{\"length\":{length},"))));
    // A step of another order of magnitude would make the others too small to see.
    let run = &mut two[1].view.run;
    run.recorded_to = Picos(4 * run.recorded_to.0);
    let own = crate::plots::timeline::length(&two[0].view);
    let page = html(&Report::new(None, &two));
    assert!(page.contains(&format!("{{\"length\":{own},")));
}

/// A sweep shows throughput against memory, and steps of predictions only as numbers.
#[test]
fn a_sweep_has_a_pareto_plot() {
    let report = Report::new(None, &cube());
    let names: Vec<&str> = report.plots().iter().map(|p| p.name.as_str()).collect();
    assert_eq!(names[..2], ["pareto", "heat"]);
    assert!(!names.contains(&"steps"));
    let plot = report.plots()[0];
    assert_eq!(
        plot.title,
        "Throughput vs. memory by prefetch_forward, units, recompute"
    );
    // Two of twelve do not fit, and all reserve the same.
    assert!(
        plot.description
            .starts_with("1 of 12 points on the front: 2, 1, true ("),
        "{}",
        plot.description
    );
    assert!(
        plot.description.contains("; 2 do not fit"),
        "{}",
        plot.description
    );
}
