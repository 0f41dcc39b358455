//! Comparisons of synthetic runs whose differences are known.

use proptest::prelude::*;
use shardlab_plan::ir::{COMPUTE, Role};
use shardlab_plan::record::{Cause, RunKind};
use shardlab_plan::units::{Bytes, Picos};
use shardlab_reports::compare::{Matrix, Pair, Part, Side, Tolerance, pair};
use shardlab_reports::stats::{Options, Verdict};
use shardlab_reports::{RunView, testing};

fn compared(a: &RunView, b: &RunView) -> Pair {
    pair(Side::new("A", a), Side::new("B", b), &Options::default())
}

fn total(parts: &[Part], side: usize) -> Picos {
    parts.iter().map(|p| p.time[side]).sum()
}

#[test]
fn a_run_does_not_differ_from_itself() {
    let view = testing::view(500);
    let p = compared(&view, &view);
    assert_eq!(p.alignment.by, "instruction");
    assert_eq!((p.alignment.matched, p.alignment.unmatched), (500, [0, 0]));
    assert_eq!(
        (p.changes.len(), p.options.len(), p.environment.len()),
        (0, 0, 0)
    );
    let step = p.step.unwrap();
    assert_eq!((step.verdict, step.change()), (Verdict::Equal, 0.0));
    assert_eq!(p.losses.unwrap().diverges, None);
    assert_eq!(p.prediction, None);
    assert!(
        p.why.iter().any(|s| s.contains("have the same step time")),
        "{:?}",
        p.why
    );
    assert!(
        p.why.iter().any(|s| s == "No option differs."),
        "{:?}",
        p.why
    );
}

/// Wall times are a partition of the step, whatever waits it has.
#[test]
fn wall_times_add_up_to_the_step() {
    let (a, b) = (testing::view(300), testing::view(457));
    let p = compared(&a, &b);
    for (side, view) in [&a, &b].into_iter().enumerate() {
        assert_eq!(total(&p.breakdown.by_phase, side), view.recorded());
        assert_eq!(total(&p.breakdown.by_unit, side), view.recorded());
        let compute: Picos = view
            .run
            .spans
            .iter()
            .filter(|s| s.stream == COMPUTE)
            .map(|s| s.end - s.start)
            .sum();
        assert_eq!(p.breakdown.compute[side], compute);
    }
}

#[test]
fn the_instruction_that_changed_is_found_under_another_digest_too() {
    let a = testing::view(200);
    let mut b = a.clone();
    // Two kernels are later and longer, one is gone, and instruction numbers are shifted as in
    // another program.
    for i in 100..200 {
        b.run.spans[i].start += Picos(9_000_000);
        b.run.spans[i].end += Picos(9_000_000);
    }
    b.run.spans[57].end += Picos(8_000_000);
    b.run.spans[58].end += Picos(1_000_000);
    for (same, by) in [(true, "instruction"), (false, "unit and phase")] {
        if !same {
            b.program.digest = "another".into();
            for instr in &mut b.instrs {
                instr.id.0 += 1000;
            }
            for span in &mut b.run.spans {
                span.instr.0 += 1000;
            }
            let samples = b.run.memory.timeline.iter_mut();
            samples.for_each(|s| s.instr.0 += 1000);
        }
        let p = compared(&a, &b);
        assert_eq!(p.alignment.by, by);
        assert_eq!((p.alignment.matched, p.alignment.unmatched), (200, [0, 0]));
        let found: Vec<(u32, u64)> = p
            .changes
            .iter()
            .map(|c| (c.instr[0].0, c.time[1].0 - c.time[0].0))
            .collect();
        assert_eq!(found, [(3 * 57, 8_000_000), (3 * 58, 1_000_000)]);
        assert_eq!(p.changes[0].unit, "layers.5");
    }
    b.run.spans.truncate(150);
    let p = compared(&a, &b);
    assert_eq!((p.alignment.matched, p.alignment.unmatched), (150, [50, 0]));
}

#[test]
fn predictions_are_judged_by_kind() {
    let predicted = testing::view(100);
    let mut measured = predicted.clone();
    measured.run.kind = RunKind::Exec;
    // Every gather takes twice as long: predicted is half of measured.
    for i in (0..100).step_by(10) {
        let span = &mut measured.run.spans[i];
        span.end = span.end + (span.end - span.start);
    }
    for (p, side) in [
        (compared(&predicted, &measured), 1),
        (compared(&measured, &predicted), 0),
    ] {
        let prediction = p.prediction.unwrap();
        assert_eq!(prediction.measured, side);
        let gather = prediction
            .by_kind
            .iter()
            .find(|k| k.work.name() == "all_gather")
            .unwrap();
        assert_eq!(
            (gather.count, gather.error, gather.mean_error),
            (10, -0.5, 0.5)
        );
        assert_eq!(prediction.worst.len(), 10);
        let others = prediction
            .by_kind
            .iter()
            .filter(|k| k.work.name() != "all_gather");
        assert!(others.into_iter().all(|k| k.error == 0.0));
    }
    // A program of another scenario was not predicted.
    let mut other = measured.clone();
    other.run.scenario = "other".to_owned();
    assert!(compared(&predicted, &other).prediction.is_some());
    other.program.digest = "other".to_owned();
    assert_eq!(compared(&predicted, &other).prediction, None);
}

/// The sentence names what makes the step longer or shorter. It names neither work hidden on other
/// streams nor errors in the other direction.
#[test]
fn the_error_of_a_step_is_that_of_what_it_consists_of() {
    let predicted = testing::view(100);
    let mut measured = predicted.clone();
    measured.run.kind = RunKind::Exec;
    // All GEMMs, and so the step, take a twentieth longer than predicted.
    let longer = |t: Picos| Picos(t.0 / 20 * 21);
    for span in &mut measured.run.spans {
        let length = span.end - span.start;
        span.start = longer(span.start);
        // Gathers, which overlap with GEMMs, take almost no time: an error in the other direction.
        span.end = match span.stream {
            COMPUTE => longer(span.end),
            _ => span.start + Picos(length.0 / 100),
        };
    }
    measured.run.recorded_to = longer(measured.run.recorded_to);
    for sample in &mut measured.run.step_samples {
        *sample = longer(*sample);
    }
    let said = |measured: &RunView| {
        let p = compared(&predicted, measured);
        let busy = p.prediction.unwrap().by_kind;
        let error = |name: &str| {
            let kind = busy.iter().find(|k| k.work.name() == name).unwrap();
            kind.predicted.0 as f64 - kind.measured.0 as f64
        };
        // By busy time, the gathers would be named.
        assert!(error("all_gather") > error("gemm").abs(), "{busy:?}");
        let mut why = p.why.into_iter();
        why.find(|s| s.contains(" predicted, ")).unwrap()
    };
    let text = said(&measured);
    assert!(
        text.contains(": the prediction is -4.8 % off. Most of the error is in gemm: "),
        "{text}"
    );
    // Waits are part of the step as well.
    measured.run.exposed = [(Cause::Host, Picos(100_000_000))].into();
    let text = said(&measured);
    assert!(
        text.contains("is in exposed time (host): 0.0 us predicted, 100.0 us measured"),
        "{text}"
    );
}

#[test]
fn waits_are_grouped_by_cause_and_by_what_was_waited_for() {
    let a = testing::view(100);
    let mut b = a.clone();
    for gap in &mut b.run.gaps {
        gap.end += Picos(2_000_000);
        gap.cause = Cause::Gate;
    }
    b.run.exposed = [(Cause::Gate, Picos(30_000_000))].into();
    let p = compared(&a, &b);
    let wait = &p.waits[0];
    assert_eq!(wait.of.name, "all_gather");
    // Five of ten gaps are in each phase.
    assert_eq!(
        (wait.count, wait.time),
        ([5, 5], [Picos(5_000_000), Picos(15_000_000)])
    );
    assert_eq!(wait.cause, [Some(Cause::Wire), Some(Cause::Gate)]);
    let causes: Vec<_> = p.exposed.iter().map(|c| (c.cause, c.time)).collect();
    assert_eq!(
        causes,
        [
            (Cause::Gate, [Picos(0), Picos(30_000_000)]),
            (Cause::Wire, [Picos(10_000_000), Picos(0)])
        ]
    );
    let sentence = p
        .why
        .iter()
        .find(|s| s.starts_with("all_gather in forward: A waits "));
    assert!(
        sentence.is_some_and(|s| s.contains("something delays its start")),
        "{:?}",
        p.why
    );
    // If another rule issues them, all are counted, not only those that are waited for.
    b.names.push("prefetch".to_owned());
    let rule = b.names.len() as u32 - 1;
    for instr in b.instrs.iter_mut().filter(|i| i.name == 1).take(3) {
        instr.rule = rule;
    }
    let p = compared(&a, &b);
    let mut why = p.why.iter();
    let sentence = why.find(|s| s.starts_with("all_gather in forward: A waits "));
    let told = " A prefetches none, B 3 of 5.";
    assert!(sentence.is_some_and(|s| s.ends_with(told)), "{:?}", p.why);
}

#[test]
fn memory_is_compared_by_role_and_place() {
    let a = testing::view(100);
    let mut b = a.clone();
    b.run.memory.peak_allocated += Bytes(3 << 20);
    b.run.memory.by_role.push((Role::Workspace, Bytes(3 << 20)));
    let grown = b
        .run
        .memory
        .timeline
        .iter_mut()
        .filter(|s| s.instr.0 == 3 * 96 + 1);
    grown.for_each(|s| s.allocated += Bytes(3 << 20));
    let p = compared(&a, &b);
    assert_eq!(p.memory.by_role[0].name, "workspace");
    assert_eq!(p.memory.by_role[0].bytes, [Bytes(0), Bytes(3 << 20)]);
    assert_eq!(p.memory.places.len(), 1);
    assert_eq!(
        (p.memory.places[0].unit.as_str(), p.memory.places[0].phase),
        ("layers.9", "backward")
    );
    let memory = p.why.iter().find(|s| s.starts_with("Memory"));
    assert!(
        memory.is_some_and(|s| s.contains("workspace +3.0 MiB")),
        "{:?}",
        p.why
    );
    let [x, y] = &p.memory.curves;
    assert_eq!(x.len(), y.len());
    assert_eq!(x.iter().zip(y).filter(|(x, y)| x != y).count(), 1);
}

/// A run without a record of memory has not used 0 bytes.
#[test]
fn unrecorded_memory_is_not_compared() {
    let a = testing::view(500);
    let mut b = a.clone();
    b.run.memory.peak_allocated = Bytes::ZERO;
    b.run.memory.peak_reserved = Bytes::ZERO;
    b.run.memory.by_role.clear();
    b.run.memory.by_unit.clear();
    let p = compared(&a, &b);
    assert!(p.memory.by_role.is_empty() && p.memory.by_unit.is_empty());
    assert!(p.memory.at[0].is_some() && p.memory.at[1].is_none());
    let why = p.why.join("\n");
    assert!(why.contains("run B has no record of it"), "{why}");
    for name in ["allocated_gib", "reserved_gib"] {
        let metric = p.metrics.iter().find(|m| m.name == name).unwrap();
        assert!(metric.values[0] > 0.0 && metric.values[1].is_nan());
        assert_eq!(metric.change(), None);
    }
    let none = compared(&b, &b);
    assert!(none.metrics.iter().all(|m| !m.name.ends_with("ed_gib")));
    assert!(none.why.iter().any(|s| s == "Memory was not recorded."));
    let summary = serde_json::to_value(b.run.summary()).unwrap();
    assert!(summary["memory"]["peak_reserved_bytes"].is_null());
    // The faster run is still the best.
    let mut fast = b.clone();
    for t in &mut fast.run.step_samples {
        t.0 /= 2;
    }
    let matrix = Matrix::new(&[("a", &a), ("fast", &fast)], Some(Tolerance::EXACT));
    let step = &matrix.metrics[0];
    assert_eq!(matrix.best(step), [false, true]);
}

#[test]
fn losses_say_where_they_part() {
    let mut a = testing::view(0);
    let mut b = a.clone();
    a.run.losses = vec![4.0, 3.0, f64::NAN, 2.0, 1.0];
    b.run.losses = vec![4.0, 3.0, f64::NAN, 2.5, 1.25, 1.0];
    let losses = compared(&a, &b).losses.unwrap();
    assert_eq!(losses.steps, [5, 6]);
    assert_eq!(losses.diverges.unwrap().step, 4);
    let largest = losses.largest.unwrap();
    assert_eq!((largest.step, largest.a, largest.b), (4, 2.0, 2.5));
    assert_eq!((losses.last.step, losses.shown.len()), (5, 5));
    // A NaN on one side is the largest possible difference.
    b.run.losses[4] = f64::NAN;
    let losses = compared(&a, &b).losses.unwrap();
    assert_eq!(losses.largest.unwrap().step, 5);
    b.run.losses.clear();
    assert_eq!(compared(&a, &b).losses, None);
}

/// A recorded step that is an outlier is reported, and no conclusions are drawn from it.
#[test]
fn an_outlier_is_not_explained() {
    let a = testing::view(200);
    let mut b = a.clone();
    b.run.kind = RunKind::Exec;
    let explained = compared(&a, &b);
    assert_eq!(explained.warnings, [] as [&str; 0]);
    // The median is far below the recorded step.
    let usual = Picos(b.recorded().0 / 2);
    b.run.step_samples = vec![usual; 20];
    let p = compared(&a, &b);
    assert_eq!(p.warnings.len(), 1, "{:?}", p.warnings);
    let expected = format!(
        "The recorded step of B ({:.2} ms) is not typical (median {:.2} ms)",
        b.recorded().ms(),
        usual.ms()
    );
    assert!(p.warnings[0].starts_with(&expected), "{:?}", p.warnings);
    let verdict = p.verdict().unwrap();
    assert!(!verdict.contains("the error is in"), "{verdict}");
    let explains = |s: &String| s.contains("Recorded step:") || s.contains("waits");
    assert!(!p.why.iter().any(explains), "{:?}", p.why);
    // The tables are there for those who want them.
    assert!(!p.breakdown.by_phase.is_empty());
}

/// Values within the tolerance share no star. Other criteria decide, until nothing is left.
#[test]
fn ties_are_broken_by_memory_and_by_the_defaults() {
    let run = |us: u64, mib: u64, prefetch: &str| {
        let mut view = testing::view(10);
        view.run.step_samples = vec![Picos(us * 1_000_000)];
        view.run.memory.peak_reserved = Bytes(mib << 20);
        view.run.memory.capacity = None;
        let key = "fsdp.prefetch_forward".to_owned();
        view.scenario.settings.insert(key, prefetch.to_owned());
        view
    };
    let marked = |runs: &[RunView]| {
        let named: Vec<(&str, &RunView)> = runs.iter().map(|r| ("x", r)).collect();
        let m = Matrix::new(&named, Some(Tolerance::DEFAULT));
        let metric = m.metrics.iter().find(|m| m.name == "step_ms").unwrap();
        let front: Vec<bool> = m.rows.iter().map(|r| r.on_front).collect();
        (m.best(metric), front)
    };
    // 0.02 % faster with more memory, and 10 % slower.
    let runs = [
        run(10_000, 1000, "1"),
        run(9_998, 1100, "2"),
        run(11_000, 1000, "0"),
    ];
    let first = vec![true, false, false];
    assert_eq!(marked(&runs), (first.clone(), first));
    // With equal memory, the default (1) wins although another value is slightly faster.
    let runs = [
        run(9_999, 1000, "2"),
        run(10_000, 1000, "1"),
        run(11_000, 1000, "0"),
    ];
    let second = vec![false, true, false];
    assert_eq!(marked(&runs), (second.clone(), second));
    // All tie.
    let runs = [run(10_000, 1000, "1"), run(10_001, 1001, "2")];
    let none = vec![false, false];
    assert_eq!(marked(&runs), (none.clone(), none));
    // A prediction is never better than a measurement, nor the reverse.
    let mut runs = [run(10_000, 1000, "1"), run(20_000, 2000, "1")];
    runs[1].run.kind = RunKind::Exec;
    let none = vec![false, false];
    assert_eq!(marked(&runs), (none.clone(), none));
}

#[test]
fn a_matrix_marks_the_best_and_the_front() {
    let mut runs = [testing::view(10), testing::view(10), testing::view(10)];
    for (i, (ms, gib)) in [(10, 3), (20, 1), (20, 2)].into_iter().enumerate() {
        runs[i].run.step_samples = vec![Picos(ms * 1_000_000_000)];
        runs[i].run.memory.peak_reserved = Bytes(gib << 30);
        runs[i].run.memory.capacity = None;
        let key = "fsdp.prefetch_forward".to_owned();
        runs[i].scenario.settings.insert(key, i.to_string());
    }
    let named: Vec<(&str, &RunView)> = ["a", "b", "c"].into_iter().zip(&runs).collect();
    let m = Matrix::new(&named, Some(Tolerance::DEFAULT));
    let front: Vec<bool> = m.rows.iter().map(|r| r.on_front).collect();
    assert_eq!(front, [true, true, false]);
    assert_eq!(m.options.len(), 1);
    let best = |name: &str| m.best(m.metrics.iter().find(|m| m.name == name).unwrap());
    assert_eq!(best("step_ms"), [true, false, false]);
    assert_eq!(best("tokens_per_s_per_gpu"), [true, false, false]);
    assert_eq!(best("reserved_gib"), [false, true, false]);
    // A run that does not fit is never the best, and steps with different work are not compared.
    runs[1].run.memory.capacity = Some(Bytes(1));
    runs[2].run.tokens *= 4;
    let named: Vec<(&str, &RunView)> = ["a", "b", "c"].into_iter().zip(&runs).collect();
    let m = Matrix::new(&named, Some(Tolerance::DEFAULT));
    let best = |name: &str| m.best(m.metrics.iter().find(|m| m.name == name).unwrap());
    assert_eq!(best("step_ms"), [false, false, false]);
    assert_eq!(best("tokens_per_s_per_gpu"), [false, false, true]);
    assert_eq!(best("reserved_gib"), [false, false, true]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Exchanging the runs exchanges every pair of numbers.
    #[test]
    fn sides_are_symmetric(
        n in prop_oneof![Just(0u32), 1u32..120],
        m in prop_oneof![Just(0u32), 1u32..120],
        same: bool,
    ) {
        let (a, mut b) = (testing::view(n), testing::view(m));
        if !same {
            b.program.digest = "another".into();
        }
        let (ab, ba) = (compared(&a, &b), compared(&b, &a));
        prop_assert_eq!(ab.alignment.matched, ba.alignment.matched);
        prop_assert_eq!(ab.alignment.unmatched[0], ba.alignment.unmatched[1]);
        prop_assert_eq!(ab.alignment.matched + ab.alignment.unmatched[0], n as usize);
        let flip = |parts: &[Part]| -> Vec<(String, [Picos; 2])> {
            parts.iter().map(|p| (p.name.clone(), [p.time[1], p.time[0]])).collect()
        };
        let plain = |parts: &[Part]| -> Vec<(String, [Picos; 2])> {
            parts.iter().map(|p| (p.name.clone(), p.time)).collect()
        };
        prop_assert_eq!(plain(&ab.breakdown.by_phase), flip(&ba.breakdown.by_phase));
        prop_assert_eq!(plain(&ab.breakdown.by_kind), flip(&ba.breakdown.by_kind));
        // Nothing is known about the parts of a step if a run has no spans.
        let told = if n > 0 && m > 0 { a.recorded() } else { Picos::ZERO };
        prop_assert_eq!(total(&ab.breakdown.by_phase, 0), told);
        prop_assert_eq!(ab.breakdown.by_phase.is_empty(), n == 0 || m == 0);
    }
}
