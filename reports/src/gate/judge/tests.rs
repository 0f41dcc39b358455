//! Tests of verdicts on changed facts.

use super::*;
use crate::gate::facts::Curve;
use crate::gate::testing::facts;
use shardlab_plan::config::{Gate, GatePreset, GateProgram};
use shardlab_plan::scenario::Position;
use shardlab_plan::units::Bytes;
use std::collections::BTreeMap;

/// Returns the limits of the preset `strict` with a change.
fn limits(change: impl Fn(&mut Gate)) -> Limits {
    changed(GatePreset::Strict, change)
}

fn changed(preset: GatePreset, change: impl Fn(&mut Gate)) -> Limits {
    let mut gate = Gate::of(preset);
    change(&mut gate);
    Limits::new(&gate, &BTreeMap::new(), Some("s.toml"))
}

/// Returns the verdict after a change, under the limits of the preset `strict`.
fn after(change: impl Fn(&mut Facts)) -> Verdict {
    let mut now = facts();
    change(&mut now);
    let base = Baseline::parse(Baseline::text(&facts()), "b.toml").unwrap();
    judge(&base, &now, &limits(|_| {}))
}

fn curve(f: &mut Facts) -> &mut Curve {
    &mut f.measured.as_mut().unwrap().curves[0]
}

/// Returns the failures as `metric: STATUS`.
fn failures(v: &Verdict) -> Vec<String> {
    v.failing()
        .map(|f| format!("{}: {}", f.metric, f.status.word()))
        .collect()
}

fn message(v: &Verdict, metric: &str) -> String {
    let f = v.findings.iter().find(|f| f.metric == metric).unwrap();
    f.message.clone()
}

#[test]
fn nothing_changed_passes() {
    let v = after(|_| {});
    assert!(v.pass, "{:?}", failures(&v));
    assert_eq!(message(&v, "loss curve"), "bitwise identical");
}

#[test]
fn a_byte_more_and_a_byte_less_fail() {
    let v = after(|f| {
        f.memory.allocated += 1;
        f.memory.by_role.insert("temporary".into(), 1);
    });
    assert_eq!(failures(&v), ["allocated: REGRESSION"]);
    assert_eq!(
        message(&v, "allocated"),
        "+1 B (+0.1 %): temporary +1 B; peak in backward layers.1"
    );
    let v = after(|f| f.memory.allocated -= 1);
    assert_eq!(failures(&v), ["allocated: IMPROVED"]);
    // Reserved and device bytes may differ by one percent.
    assert!(after(|f| f.memory.reserved += 12).pass);
    assert_eq!(
        failures(&after(|f| f.memory.reserved += 13)),
        ["reserved: REGRESSION"]
    );
    assert_eq!(
        failures(&after(|f| f.memory.device -= 21)),
        ["device: IMPROVED"]
    );
}

#[test]
fn measured_memory_is_judged_too() {
    let v = after(|f| {
        if let Some(m) = f.measured.as_mut().and_then(|m| m.memory.as_mut()) {
            m.allocated += 64;
        }
    });
    assert_eq!(failures(&v), ["allocated, measured: REGRESSION"]);
}

#[test]
fn predicted_time_names_its_causes() {
    let v = after(|f| {
        f.time.step_ps += 30_000_000;
        f.time.exposed_ps.insert("gate".into(), 20_000_000);
    });
    assert_eq!(failures(&v), ["step, predicted: REGRESSION"]);
    assert_eq!(
        message(&v, "step, predicted"),
        "+0.0300 ms (+1.5 %): compute +0.0100 ms, exposed by gate +0.0200 ms"
    );
    assert!(after(|f| f.time.step_ps += 9_000_000).pass);
    assert_eq!(
        failures(&after(|f| f.time.step_ps -= 11_000_000)),
        ["step, predicted: IMPROVED"]
    );
}

#[test]
fn a_changed_program_shows_its_diff() {
    let change = |f: &mut Facts| {
        f.program.digest = "fedcba9876543210".into();
        f.program.outline = f.program.outline.replace("mm: ", "alloc tmp 64; mm: ");
        let counts = f.program.instructions.get_mut("steady").unwrap();
        counts.insert("alloc".into(), 3);
    };
    let v = after(change);
    assert_eq!(failures(&v), ["digest: CHANGED"]);
    let f = v.failing().next().unwrap();
    assert_eq!(f.message, "steady: +1 alloc (5 to 6 instructions)");
    assert!(f.detail.contains("\n+alloc tmp 64\n"), "{}", f.detail);
    // A regression names the buffer.
    let v = after(|f| {
        change(f);
        f.memory.allocated += 64;
    });
    assert!(message(&v, "allocated").ends_with("; 1 more temporary buffer (64 B)"));
    let base = Baseline::of(facts());
    let mut now = facts();
    change(&mut now);
    let with = |p| limits(move |g| g.program = p);
    assert!(judge(&base, &now, &with(GateProgram::Off)).pass);
    assert!(!judge(&base, &now, &with(GateProgram::Counts)).pass);
    now.program.instructions = facts().program.instructions;
    assert!(judge(&base, &now, &with(GateProgram::Counts)).pass);
    assert!(!judge(&base, &now, &with(GateProgram::Exact)).pass);
}

#[test]
fn broken_proofs_fail_even_when_the_baseline_has_them() {
    let mut broken = facts();
    broken.check.errors = 1;
    broken.check.violations = vec!["[CHK-X] a race".into()];
    let v = judge(&Baseline::of(broken.clone()), &broken, &limits(|_| {}));
    assert_eq!(failures(&v), ["check: REGRESSION"]);
    assert_eq!(message(&v, "check"), "[CHK-X] a race");
}

#[test]
fn curves_leave_their_band() {
    // 0.1 % of 5.0 is 0.005.
    assert!(after(|f| curve(f).losses[1] += 0.004).pass);
    let v = after(|f| curve(f).losses[1] += 0.006);
    assert_eq!(failures(&v), ["loss curve: REGRESSION"]);
    assert_eq!(
        message(&v, "loss curve"),
        "outside at 1 of 4 steps, first at step 2; furthest at step 2: 5.006000 instead of 5.000000 (+0.120 %)"
    );
    // Each step is within its band, but all of them deviate in the same direction: 0.0009 of every
    // loss exceeds the limit of 0.0005 for the area.
    let v = after(|f| curve(f).losses.iter_mut().for_each(|x| *x *= 1.0009));
    assert_eq!(failures(&v), ["area between losses: REGRESSION"]);
    // A lower final loss changes the curve, but is not a worse final loss.
    let v = after(|f| curve(f).losses[3] -= 0.01);
    assert!(!failures(&v).iter().any(|f| f.starts_with("final loss")));
    let v = after(|f| curve(f).losses[3] += 0.01);
    assert!(failures(&v).contains(&"final loss: REGRESSION".to_owned()));
}

#[test]
fn an_absolute_tolerance_adds_to_the_relative_one_and_zero_means_bits() {
    let base = Baseline::of(facts());
    let mut now = facts();
    curve(&mut now).losses[1] += 0.1;
    let wide = limits(|g| {
        g.loss_absolute = 0.1;
        g.loss_area = 1.0;
    });
    assert!(judge(&base, &now, &wide).pass);
    let bits = limits(|g| g.loss = 0.0);
    assert!(judge(&base, &facts(), &bits).pass);
    let mut now = facts();
    now.measured.as_mut().unwrap().curves[0].losses[1] = 5.0f64.next_up();
    let v = judge(&base, &now, &bits);
    assert_eq!(failures(&v), ["loss curve: REGRESSION"]);
    assert_eq!(v.failing().next().unwrap().limit, "bit-exact");
}

#[test]
fn nan_and_missing_steps_never_pass() {
    let v = after(|f| curve(f).losses[2] = f64::NAN);
    let all = failures(&v);
    for metric in ["finite", "loss curve", "area between losses"] {
        assert!(all.contains(&format!("{metric}: REGRESSION")), "{all:?}");
    }
    assert_eq!(message(&v, "finite"), "seed 0: the loss of step 3 is NaN");
    let v = after(|f| curve(f).grad_norms[0] = f64::INFINITY);
    assert!(failures(&v).contains(&"gradient norm: REGRESSION".to_owned()));
    let v = after(|f| {
        curve(f).losses.truncate(2);
        curve(f).ended = Some("the loss is NaN".into());
    });
    assert_eq!(message(&v, "loss curve"), "2 steps instead of 4");
    assert_eq!(message(&v, "finite"), "seed 0: the loss is NaN");
    let v = after(|f| curve(f).losses.clear());
    assert!(!v.pass);
    // A NaN in the baseline does not excuse a NaN now.
    let mut nan = facts();
    curve(&mut nan).losses[2] = f64::NAN;
    assert!(!judge(&Baseline::of(nan.clone()), &nan, &limits(|_| {})).pass);
}

#[test]
fn a_gradient_scale_off_by_the_world_size_is_called_so() {
    let v = after(|f| curve(f).grad_norms.iter_mut().for_each(|x| *x *= 2.0));
    assert_eq!(failures(&v), ["gradient norm: REGRESSION"]);
    assert_eq!(
        message(&v, "gradient norm"),
        "outside at 4 of 4 steps, first at step 1: 2.00000 instead of 1.00000, 2.0000 times: off by the world size (2), a sum where a mean belongs"
    );
    let v = after(|f| curve(f).grad_norms.iter_mut().for_each(|x| *x *= 0.5));
    assert!(message(&v, "gradient norm").ends_with("a mean taken twice"));
    let v = after(|f| curve(f).grad_norms[1] *= 1.7);
    assert!(!message(&v, "gradient norm").contains("world size"));
}

/// With five seeds, the noise between seeds does not hide a common shift.
#[test]
fn several_seeds_are_tested_together() {
    let seeds = |shift: f64, noise: f64| {
        let mut f = facts();
        let m = f.measured.as_mut().unwrap();
        let one = m.curves[0].clone();
        m.curves = (0..5u64)
            .map(|seed| {
                let mut c = one.clone();
                c.seed = seed;
                let wobble = noise * [0.0, 1.0, -1.0, 0.5, -0.5][seed as usize];
                c.losses = vec![5.5, 5.0, 4.5, 4.0 + 0.3 * seed as f64 + shift + wobble];
                c
            })
            .collect();
        f
    };
    let base = Baseline::of(seeds(0.0, 0.0));
    let l = limits(|_| {});
    assert!(judge(&base, &seeds(0.0, 0.0), &l).pass);
    let v = judge(&base, &seeds(0.05, 0.01), &l);
    assert_eq!(failures(&v), ["final loss over seeds: REGRESSION"]);
    let text = message(&v, "final loss over seeds");
    assert!(
        text.starts_with("+0.050000 (+1.087 %), paired t test p = 0.000"),
        "{text}"
    );
    assert!(
        text.contains("5 seeds would show a difference of "),
        "{text}"
    );
    // A shift within the noise does not fail, and the message says so.
    let v = judge(&base, &seeds(0.01, 0.2), &l);
    let f = v
        .findings
        .iter()
        .find(|f| f.metric == "final loss over seeds")
        .unwrap();
    assert_eq!(f.status, Status::Inconclusive);
    assert!(judge(&base, &seeds(-0.05, 0.01), &l).pass);
}

/// A run with another seed contains no information about the baseline's seeds.
#[test]
fn a_seed_without_a_counterpart_is_reported() {
    let v = after(|f| curve(f).seed = 7);
    assert_eq!(failures(&v), ["seeds: CHANGED"]);
    assert_eq!(message(&v, "seeds"), "seed 0 was not run");
    // An additional seed does not fail, but is not judged either.
    let v = after(|f| {
        let more = Curve {
            seed: 7,
            ..curve(f).clone()
        };
        f.measured.as_mut().unwrap().curves.push(more);
    });
    assert!(v.pass, "{:?}", failures(&v));
    assert_eq!(
        message(&v, "seeds"),
        "the baseline has no seed 7: bless it again"
    );
}

#[test]
fn skipped_comparisons_are_reported() {
    let v = after(|f| f.measured = None);
    assert!(v.pass);
    let f = v
        .findings
        .iter()
        .find(|f| f.status == Status::Skipped)
        .unwrap();
    assert_eq!(
        f.message,
        "the baseline has measured runs, this call has none: give --run, or leave out --no-exec"
    );
    let v = after(|f| f.set.clear());
    assert_eq!(
        message(&v, "overrides"),
        "the baseline was made with other overrides"
    );
}

#[test]
fn annotations_point_at_the_limit_or_at_the_baseline() {
    let base = Baseline::parse(Baseline::text(&facts()), "b.toml").unwrap();
    let mut now = facts();
    now.memory.allocated *= 2;
    now.memory.device *= 2;
    let at = Position {
        line: 9,
        column: 10,
    };
    let places = BTreeMap::from([("gate.device".to_owned(), ("s.toml".to_owned(), at))]);
    let l = Limits::new(&Gate::of(GatePreset::Strict), &places, Some("s.toml"));
    let v = judge(&base, &now, &l);
    let place = |metric: &str| {
        let f = v.findings.iter().find(|f| f.metric == metric).unwrap();
        f.place.as_ref().unwrap().to_string()
    };
    assert_eq!(place("device"), "s.toml:9:10");
    let line = Baseline::text(&facts())
        .lines()
        .position(|l| l == "allocated = 1000")
        .unwrap();
    assert_eq!(place("allocated"), format!("b.toml:{}:1", line + 1));
    // Without a file, the annotation points at the scenario itself.
    let v = judge(&Baseline::of(facts()), &now, &l);
    let f = v.findings.iter().find(|f| f.metric == "allocated").unwrap();
    assert_eq!(f.place.as_ref().unwrap().to_string(), "s.toml:1:1");
}

/// All three formats, with one failing and one passing scenario.
#[test]
fn formats() {
    let mut v = after(|f| {
        f.memory.allocated += 1;
        f.program.digest = "<fed>".into();
        f.program.outline = f.program.outline.replace("mm: ", "alloc tmp 64; mm: ");
        curve(f).grad_norms.iter_mut().for_each(|x| *x *= 2.0);
    });
    v.scenario = "a|b".into();
    let all = [v, after(|_| {})];
    insta::assert_snapshot!("junit", crate::gate::format::junit(&all));
    insta::assert_snapshot!("markdown", crate::gate::format::markdown(&all));
    insta::assert_snapshot!("github", crate::gate::format::github(&all));
}

#[test]
fn without_a_counterpart_only_what_is_broken_fails() {
    let v = alone(facts(), &limits(|_| {}), "no such scenario there");
    assert!(v.pass, "{:?}", failures(&v));
    assert_eq!(v.findings.len(), 3);
    assert_eq!(message(&v, "baseline"), "no such scenario there");
    let mut broken = facts();
    broken.check.errors = 1;
    curve(&mut broken).losses[2] = f64::NAN;
    let v = alone(broken, &limits(|_| {}), "no such scenario there");
    let found = failures(&v);
    assert_eq!(found, ["check: REGRESSION", "finite: REGRESSION"]);
}

#[test]
fn a_baseline_that_is_missing_fails_beside_what_needs_none() {
    let tight = limits(|g| g.max_step_ms = Some(1.5));
    let there = Place {
        file: "b.toml".into(),
        line: 7,
        column: 1,
    };
    let v = missing(facts(), &tight, "it is no TOML", Some(there.clone()));
    let found = failures(&v);
    assert_eq!(found, ["budget, step: REGRESSION", "baseline: NO BASELINE"]);
    assert_eq!(message(&v, "baseline"), "it is no TOML");
    assert_eq!(v.findings.last().unwrap().place, Some(there));
    // The only failure is that nothing was compared.
    let v = missing(facts(), &limits(|_| {}), "there is none", None);
    assert_eq!(failures(&v), ["baseline: NO BASELINE"]);
    assert!(!v.pass);
}

#[test]
fn options_that_differ_are_named() {
    let v = after(|f| {
        f.options.insert("train.lr".into(), "0.002".into());
        // An option of another version.
        f.options.insert("train.new".into(), "1".into());
    });
    assert!(v.pass);
    assert_eq!(
        message(&v, "options"),
        "scenario changed: train.lr 0.001 → 0.002"
    );
    assert!(!after(|_| {}).findings.iter().any(|f| f.metric == "options"));
}

#[test]
fn a_step_that_no_longer_fits_fails_whatever_the_limits() {
    let base = Baseline::parse(Baseline::text(&facts()), "b.toml").unwrap();
    let verdict = |device: u64, capacity: u64| {
        let mut now = facts();
        now.memory.device = device;
        now.memory.capacity = Some(capacity);
        judge(&base, &now, &limits(|g| g.device = 0.5))
    };
    // The baseline's peak is 2,000 bytes.
    assert!(verdict(2100, 2100).pass);
    let v = verdict(2101, 2100);
    assert_eq!(failures(&v), ["fits: REGRESSION"]);
    assert_eq!(
        message(&v, "fits"),
        "needs 2.1 KiB, the device has 2.1 KiB: 1 B too much"
    );
    // A step that did not fit before is reported.
    let v = verdict(2000, 1999);
    assert!(v.pass && v.findings.iter().any(|f| f.metric == "fits"));
}

#[test]
fn budgets_hold_whatever_the_baseline_has() {
    // Reserved memory of 1,200 bytes and a step of 2 ms, as in the baseline.
    let base = Baseline::parse(Baseline::text(&facts()), "b.toml").unwrap();
    let verdict = |memory: u64, ms: f64| {
        let limits = limits(|g| {
            g.max_memory = Some(Bytes(memory));
            g.max_step_ms = Some(ms);
        });
        (
            judge(&base, &facts(), &limits),
            alone(facts(), &limits, "new"),
        )
    };
    let (v, lonely) = verdict(1200, 2.0);
    assert!(v.pass && lonely.pass);
    let named = |v: &Verdict| {
        v.findings
            .iter()
            .filter(|f| f.metric.starts_with("budget"))
            .count()
    };
    assert_eq!((named(&v), named(&lonely)), (3, 3));
    let (v, lonely) = verdict(1199, 1.5);
    let expected = [
        "budget, reserved: REGRESSION",
        "budget, reserved and measured: REGRESSION",
        "budget, step: REGRESSION",
    ];
    assert_eq!(failures(&v), expected);
    assert_eq!(failures(&lonely), expected);
    assert_eq!(
        message(&v, "budget, reserved"),
        "1.2 KiB, 1 B over the budget of 1.2 KiB"
    );
    assert_eq!(
        message(&v, "budget, step"),
        "2.00 ms, 0.5000 ms over the budget of 1.50 ms"
    );
    // There are no budgets by default.
    assert_eq!(named(&after(|_| {})), 0);
}

#[test]
fn losses_that_are_lower_at_every_step_outside_are_better() {
    let v = after(|f| curve(f).losses[1] = 4.0);
    assert_eq!(
        failures(&v),
        ["loss curve: IMPROVED", "area between losses: IMPROVED"]
    );
    let v = after(|f| {
        curve(f).losses[1] = 4.0;
        curve(f).losses[2] = 4.9;
    });
    assert_eq!(
        failures(&v),
        ["loss curve: REGRESSION", "area between losses: REGRESSION"]
    );
}

/// All failures caused by one change are one failure, and the change comes first.
#[test]
fn failures_of_one_cause_are_one_failure() {
    let grow = |f: &mut Facts| {
        f.program.digest = "fedcba9876543210".into();
        f.program.outline.push_str("8x{alloc tmp 448Mi}\n");
        f.memory.allocated *= 2;
        f.memory.reserved *= 2;
        f.memory.device *= 2;
    };
    let v = after(grow);
    assert_eq!(v.failing().count(), 4);
    let [failure] = &v.failures[..] else {
        panic!("{:?}", v.failures);
    };
    assert!(
        failure.cause.starts_with("program changed: "),
        "{}",
        failure.cause
    );
    assert_eq!(
        failure.metrics,
        ["allocated", "reserved", "device", "digest"]
    );
    assert!(message(&v, "allocated").ends_with("; 8 more temporary buffers (448 MiB each)"));
    // Buffers are listed only once, not for every peak.
    assert!(!message(&v, "reserved").contains("buffers"));
    let v = after(|f| {
        grow(f);
        f.options.insert("train.lr".into(), "0.002".into());
    });
    let [failure] = &v.failures[..] else {
        panic!("{:?}", v.failures);
    };
    assert_eq!(failure.cause, "scenario changed: train.lr 0.001 → 0.002");
    let place = failure.place.as_ref().unwrap();
    let text = Baseline::text(&facts());
    let line = text.lines().nth(place.line as usize - 1).unwrap();
    assert!(line.contains("lr = 0.001"), "{line}");
    // A race is a separate failure, and so is anything without an explanation.
    let v = after(|f| {
        grow(f);
        f.check.errors = 1;
    });
    assert_eq!(v.failures.len(), 2);
    let v = after(|f| {
        f.memory.allocated *= 2;
        f.memory.reserved *= 2;
        f.time.step_ps *= 2;
    });
    let causes: Vec<&str> = v.failures.iter().map(|f| f.cause.as_str()).collect();
    assert_eq!(
        causes,
        [
            "memory changed, program and scenario did not",
            "step time changed, program and scenario did not"
        ]
    );
}

#[test]
fn a_larger_peak_names_buffers_that_are_more_and_a_smaller_one_those_that_are_fewer() {
    let swap = |f: &mut Facts| {
        f.program.digest = "fedcba9876543210".into();
        f.program.outline = f
            .program
            .outline
            .replace("alloc act 600", "alloc tmp 3*1Ki");
    };
    let v = after(|f| {
        swap(f);
        f.memory.allocated *= 2;
    });
    assert!(message(&v, "allocated").ends_with("; 3 more temporary buffers (1 KiB each)"));
    let v = after(|f| {
        swap(f);
        f.memory.allocated /= 2;
    });
    assert!(message(&v, "allocated").ends_with("; 1 fewer activation buffer (600 B)"));
}

/// Preset `budget`: only growth beyond a tolerance, a budget or the device's capacity fails.
#[test]
fn budgets_fail_on_growth_alone() {
    let base = Baseline::parse(Baseline::text(&facts()), "b.toml").unwrap();
    let verdict = |change: &dyn Fn(&mut Facts)| {
        let mut now = facts();
        change(&mut now);
        judge(&base, &now, &changed(GatePreset::Budget, |_| {}))
    };
    let v = verdict(&|f| {
        f.program.digest = "fedcba9876543210".into();
        f.memory.allocated = 1;
        f.memory.reserved /= 2;
        f.time.step_ps /= 2;
        curve(f).losses[1] = 4.0;
    });
    assert!(v.pass, "{:?}", failures(&v));
    assert!(v.change.unwrap().starts_with("program changed"));
    assert!(verdict(&|f| f.memory.allocated += 20).pass);
    let v = verdict(&|f| f.memory.allocated += 21);
    assert_eq!(failures(&v), ["allocated: REGRESSION"]);
    assert_eq!(v.failing().next().unwrap().limit, "+2 %");
    assert_eq!(
        failures(&verdict(&|f| f.memory.reserved += 25)),
        ["reserved: REGRESSION"]
    );
    assert_eq!(
        failures(&verdict(&|f| f.time.step_ps += 11_000_000)),
        ["step, predicted: REGRESSION"]
    );
    // The step has to fit, whether or not it did before.
    let fit = |capacity: u64| verdict(&move |f: &mut Facts| f.memory.capacity = Some(capacity));
    assert!(fit(2000).pass);
    assert_eq!(fit(2000).finding("fits").unwrap().message, "0 B to spare");
    assert_eq!(failures(&fit(1999)), ["fits: REGRESSION"]);
    assert_eq!(
        fit(1999).failures[0].cause,
        "the step does not fit the device"
    );
}

#[test]
fn a_baseline_of_the_first_format_is_compared_without_a_diff() {
    let old = include_str!("old.toml");
    let base = Baseline::parse(old.to_owned(), "old.toml").unwrap();
    assert_eq!(base.facts.options["train.lr"], "0.001");
    assert_eq!(base.option_place("train.lr").unwrap().line, 10);
    let mut now = facts();
    now.program.outline = base.facts.program.outline.clone();
    assert_eq!(base.facts, now);
    let v = judge(&base, &facts(), &limits(|_| {}));
    assert!(v.pass, "{:?}", failures(&v));
    now.program.digest = "fedcba9876543210".into();
    now.memory.allocated += 1;
    let v = judge(&base, &now, &limits(|_| {}));
    let f = v.finding("digest").unwrap();
    assert!(
        f.detail
            .starts_with("no diff of the plan: the baseline is of an older format")
    );
}
