//! Tests the whole path from a trace's text to a run, with a synthetic trace and damaged ones.

use crate::attribute::{Attributed, Work, attribute};
use crate::facts::{self, Ahead, Recompute, Reshard};
use crate::kineto::{self, Trace};
use crate::measured::{Labels, measured, step_times, typical};
use crate::testing;
use proptest::prelude::*;
use shardlab_plan::program::Phase;
use std::collections::BTreeMap;
use std::path::Path;

fn read(text: &[u8]) -> Option<(Trace, Attributed)> {
    let trace = kineto::read(text, Path::new("t.json")).ok()?;
    let attributed = attribute(&trace);
    Some((trace, attributed))
}

/// Runs every analysis on a trace.
fn all(text: &[u8]) {
    let Some((trace, a)) = read(text) else { return };
    let times = step_times(&trace, &a);
    let _ = facts::find(&trace, &a, typical(&times).map(|t| t.step));
    let _ = measured(&trace, &a, &times, &BTreeMap::new(), Labels::default());
}

#[test]
fn device_work_has_its_place() {
    let text = testing::trace();
    let (trace, a) = read(text.as_bytes()).unwrap();
    assert_eq!(a.units.names(), ["root", "layers.0", "layers.1"]);
    assert_eq!(a.steps.all.len(), 2);
    assert_eq!(a.time.0, a.time.1);
    let count = |phase: Phase, unit: u32, work: Work| {
        let found = a
            .work
            .iter()
            .filter(|w| w.place.phase == phase && w.place.unit == unit && w.work == work);
        found.count()
    };
    // The same in each of two steps.
    for unit in [1, 2] {
        assert_eq!(count(Phase::Forward, unit, Work::AllGather), 2);
        assert_eq!(count(Phase::Forward, unit, Work::Gemm), 2);
        assert_eq!(count(Phase::Backward, unit, Work::AllGather), 2);
        assert_eq!(count(Phase::Backward, unit, Work::Gemm), 4, "unit {unit}");
        assert_eq!(count(Phase::Backward, unit, Work::ReduceScatter), 2);
    }
    assert_eq!(count(Phase::Optimizer, 0, Work::Optimizer), 2);
    assert_eq!(a.work.len(), trace.device.len());
}

#[test]
fn facts_follow_from_the_trace() {
    let (trace, a) = read(testing::trace().as_bytes()).unwrap();
    let step = typical(&step_times(&trace, &a)).map(|t| t.step);
    assert_eq!(step, Some(1));
    let f = facts::find(&trace, &a, step);
    assert_eq!(f.world_size.unwrap().value, 2);
    assert_eq!(f.reshard.unwrap().value, Reshard::Always);
    assert_eq!(f.prefetch_forward.unwrap().value, Ahead::Implicit);
    assert_eq!(f.recompute.unwrap().value, Recompute::None);
    assert_eq!(f.accumulation.unwrap().value, 1);
    assert_eq!(
        (f.compute.unwrap().value, f.main_params.unwrap().value),
        ("bf16", "f32")
    );
    assert_eq!(f.units[0].gathered, 128);
}

/// Returns the scenario that a recorded trace of two H200 shows, without comments.
fn inferred(file: &str) -> (String, crate::facts::Facts) {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/traces/");
    let (facts, _) = crate::facts_of(format!("{folder}{file}").as_ref()).unwrap();
    let text = crate::infer::infer(&facts, file, None).text;
    let lines = text.lines().map(|l| match l.starts_with('#') {
        true => l,
        false => l.split('#').next().unwrap_or(l).trim_end(),
    });
    (lines.collect::<Vec<_>>().join("\n"), facts)
}

#[track_caller]
fn has(text: &str, lines: &[&str]) {
    for line in lines {
        assert!(text.lines().any(|l| l == *line), "{line} is not in {text}");
    }
}

/// PEFT's LoraConfig(r=16, `target_modules` `q_proj` and `v_proj`) on a Llama with an intermediate
/// size of 2816 and 136,672,256 parameters.
#[test]
fn adapters_are_not_the_feed_forward_layer() {
    let (text, facts) = inferred("lora.json.gz");
    let expected = [
        "ffn = 2816",
        "r = 16",
        "target_modules = [\"q_proj\", \"v_proj\"]",
        "tie_embeddings = false",
    ];
    has(&text, &expected);
    assert_eq!(facts.model.parameters, None);
    let gathered: u64 = facts.units.iter().map(|u| u.gathered).sum();
    assert_eq!(gathered, 136_672_256);
}

/// Qwen3-MoE with 16 experts of width 768, 4 of them per token, tied embeddings and 194,323,968
/// parameters.
#[test]
fn experts_are_not_the_feed_forward_layer() {
    let (text, facts) = inferred("experts.json.gz");
    let expected = [
        "family = \"moe\"",
        "experts = 16",
        "top_k = 4",
        "expert_ffn = 768",
        "qk_norm = true",
        "tie_embeddings = true",
    ];
    has(&text, &expected);
    assert!(!text.contains("\nffn"), "{text}");
    assert_eq!(facts.model.parameters, Some(194_323_968));
}

/// CPUOffloadPolicy with parameters in float32.
#[test]
fn offloaded_state_is_seen() {
    let (text, _) = inferred("offload.json.gz");
    let expected = [
        "offload = [\"params\", \"grads\", \"optimizer\"]",
        "main_params = \"f32\"",
        "main_grads = \"f32\"",
    ];
    has(&text, &expected);
    // Other jobs have their optimizer on the device.
    assert!(!inferred("experts.json.gz").0.contains("offload"));
}

/// `fully_shard` on a mesh of 2 replicas of 1 shard, with AdamW(foreach=True, betas=(0.9, 0.95),
/// lr=3e-4, weight_decay=0.1).
#[test]
fn replicas_of_one_rank_are_no_shards() {
    let (text, _) = inferred("replicas.json.gz");
    let expected = [
        "family = \"gpt2\"",
        "dp_shard = 1",
        "dp_replicate = 2",
        "strategy = \"optim_grads_params\"",
        "units = \"block\"",
        "betas = [0.9, 0.95]",
        "eps = 1e-8",
    ];
    has(&text, &expected);
    assert!(text.contains("train.lr, train.weight_decay:"), "{text}");
    assert!(text.contains("lr × weight_decay is 3e-5"), "{text}");
}

/// SGD(lr=1e-2, momentum=0.9).
#[test]
fn momentum_is_a_state() {
    let (text, _) = inferred("momentum.json.gz");
    has(&text, &["optimizer = \"lion\""]);
    assert!(text.contains("SGD with momentum 0.9 is not"), "{text}");
}

/// `set_modules_to_forward_prefetch` and `set_modules_to_backward_prefetch`, up to two blocks, on
/// blocks only:
/// the embedding, and the unit of norm and head, prefetch as the engine does.
#[test]
fn prefetches_of_some_units_are_lists() {
    let (text, _) = inferred("prefetch-lists.json.gz");
    let list = text.lines().find(|l| l.starts_with("prefetch_lists"));
    let expected = "{ unit = \"layers.2\", forward = [\"layers.3\", \"layers.4\"], backward = [\"layers.1\", \"layers.0\"] }";
    assert!(list.unwrap().contains(expected), "{text}");
    assert!(!list.unwrap().contains("tok_embeddings"), "{text}");
    assert!(!text.contains("prefetch_forward"), "{text}");
    // Each unit of this job prefetches the next two.
    assert!(
        inferred("prefetch2.json.gz")
            .0
            .contains("prefetch_forward = 2")
    );
}

/// The host spends 300 us of the two steps in the `DataLoader`.
#[test]
fn waits_for_data_are_host_time() {
    let text = testing::trace();
    let range = r#"{"ph": "X", "cat": "user_annotation", "name": "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "pid": 1, "tid": 1, "ts": AT.25, "dur": 150, "args": {}},"#;
    let at = |at: &str| range.replace("AT", at);
    let with = text.replacen(
        "\"traceEvents\": [",
        &format!("\"traceEvents\": [{}{}", at("0"), at("180")),
        1,
    );
    let waits = |text: &str| {
        let (trace, a) = read(text.as_bytes()).unwrap();
        facts::find(&trace, &a, None).data_wait
    };
    assert_eq!(waits(&text), 0);
    assert_eq!(waits(&with), 150_000);
}

/// A file with the collectives of two devices has the traces of two ranks.
#[test]
fn merged_ranks_are_reported() {
    let text = testing::trace();
    let merged = |text: &str| {
        let (trace, a) = read(text.as_bytes()).unwrap();
        facts::find(&trace, &a, None).merged_devices
    };
    assert_eq!(merged(&text), None);
    // The first of the device events is the kernel of an all-gather.
    let two = text.replacen("\"device\": 0", "\"device\": 1", 1);
    assert!(merged(&two).unwrap().contains("2 devices"));
}

#[test]
fn a_run_has_spans_and_flops_of_one_step() {
    let (trace, a) = read(testing::trace().as_bytes()).unwrap();
    let times = step_times(&trace, &a);
    let m = measured(&trace, &a, &times, &BTreeMap::new(), Labels::default());
    // Two units: gather, GEMM, gather, two GEMMs, reduction; and the optimizer.
    assert_eq!(m.run.spans.len(), 13);
    assert_eq!(m.streams, ["compute", "all_gather"]);
    assert_eq!(m.flops, 2 * 2 * 4 * 8 * 16);
    assert!(m.run.spans.windows(2).all(|w| w[0].issued <= w[1].issued));
    assert!(
        m.run
            .spans
            .iter()
            .all(|s| s.issued <= s.start && s.ready <= s.start && s.start < s.end)
    );
    assert_eq!(m.run.step_samples.len(), 1);
    let gaps: u64 = m.run.gaps.iter().map(|g| g.end.0 - g.start.0).sum();
    assert_eq!(gaps, m.run.exposed_total().0);
    assert!(m.run.recorded_to > m.run.recorded_from);
}

#[test]
fn what_is_not_understood_is_counted() {
    let (trace, _) = read(testing::trace().as_bytes()).unwrap();
    assert_eq!(
        trace.unknown,
        BTreeMap::from([("of_tomorrow".to_owned(), 1), ("ph Q".to_owned(), 1)])
    );
    // Waits are not work.
    assert_eq!(trace.context["cuda_sync"], 1);
    let known = trace.host.len() + trace.launches.len() + trace.device.len() + trace.memory.len();
    let counted: u64 = trace.context.values().chain(trace.unknown.values()).sum();
    assert_eq!(known as u64 + counted, trace.events);
    assert_eq!(trace.malformed, 0);
}

#[test]
fn a_cut_keeps_what_stands_before_it() {
    let text = testing::trace();
    let (whole, _) = read(text.as_bytes()).unwrap();
    let cut = text.len() / 2;
    let trace = kineto::read(&text.as_bytes()[..cut], Path::new("t.json")).unwrap();
    assert!(trace.events > whole.events / 3 && trace.events < whole.events);
    assert!(trace.notes[0].contains("cut off"), "{:?}", trace.notes);
}

/// A step whose last kernels are missing looks shorter than it is.
#[test]
fn the_step_in_which_a_file_ends_is_not_complete() {
    let text = testing::trace();
    let (whole, a) = read(text.as_bytes()).unwrap();
    assert!(!whole.is_cut_off);
    assert_eq!(step_times(&whole, &a).len(), 2);
    // In the backward of each step, between its operators and its optimizer.
    let optimizers: Vec<usize> = text.match_indices("FusedAdam").map(|m| m.0).collect();
    for (step, at) in optimizers.into_iter().enumerate() {
        // The end of an event.
        let cut = text[..at - 400].rfind("},\n").unwrap() + 1;
        let (trace, a) = read(&text.as_bytes()[..cut]).unwrap();
        assert!(trace.is_cut_off);
        let complete = step_times(&trace, &a);
        let found: Vec<u32> = complete.iter().map(|t| t.step).collect();
        let expected: Vec<u32> = (0..step as u32).collect();
        assert_eq!(found, expected, "cut in step {step}");
        // A note says so before all others.
        assert!(trace.notes[0].contains("cut off"), "{:?}", trace.notes);
    }
}

#[test]
fn impossible_numbers_are_malformed() {
    let kernel = |ts: &str, dur: &str, bytes: &str| {
        format!(
            r#"{{"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy", "pid": 0, "tid": 7, "ts": {ts}, "dur": {dur}, "args": {{"bytes": {bytes}}}}}"#
        )
    };
    let (whole, a) = read(testing::trace().as_bytes()).unwrap();
    let expected = a.time;
    for (event, reason) in [
        (kernel("9e18", "1", "1"), "`ts` is not a number"),
        (kernel("9000000000000000", "1", "1"), "`ts` is too large"),
        (kernel("100", "9e14", "1"), "`dur` is too large"),
        (
            kernel("100", "1", "99999999999999"),
            "more than a device has",
        ),
        // One a day and one an hour later.
        (kernel("90000000000", "1", "1"), "their times are damaged"),
        // Two hours.
        (kernel("100", "7200000000", "1"), "their times are damaged"),
    ] {
        let text = testing::trace().replacen("[\n", &format!("[\n{event},\n"), 1);
        let (trace, a) = read(text.as_bytes()).unwrap();
        assert_eq!(trace.malformed, 1, "{reason}: {:?}", trace.notes);
        assert!(
            trace.notes[0].contains(reason),
            "{reason}: {:?}",
            trace.notes
        );
        assert_eq!(trace.device.len(), whole.device.len(), "{reason}");
        assert_eq!(a.time, expected, "{reason}");
    }
}

/// A matmul may clear its output before it accumulates into it. Only the GEMM kernel has the
/// operator's name.
#[test]
fn helpers_of_a_matmul_keep_their_own_names() {
    let text = testing::trace();
    let mm = text.find(r#""name": "aten::mm""#).unwrap();
    let id = text[mm..].split(r#""External id": "#).nth(1).unwrap();
    let id: u32 = id.split([',', '}']).next().unwrap().parse().unwrap();
    let fill = format!(
        r#"{{"ph": "X", "cat": "gpu_memset", "name": "Memset (Device)", "pid": 0, "tid": 7, "ts": 31, "dur": 1, "args": {{"External id": {id}, "stream": 7, "device": 0}}}}"#
    );
    let count = |text: &str, name: &str| {
        let (trace, a) = read(text.as_bytes()).unwrap();
        let times = step_times(&trace, &a);
        // The matmul is in the first step.
        let m = measured(&trace, &a, &times[..1], &BTreeMap::new(), Labels::default());
        let named = m.instrs.iter().filter(|i| m.names[i.name as usize] == name);
        named.count()
    };
    let filled = text.replacen("[\n", &format!("[\n{fill},\n"), 1);
    assert_eq!(count(&filled, "mm"), count(&text, "mm"));
    assert_eq!((count(&text, "Memset "), count(&filled, "Memset ")), (0, 1));
}

/// Returns the numbers of a JSON document, in order.
fn numbers(value: &mut serde_json::Value) -> Vec<&mut serde_json::Value> {
    match value {
        serde_json::Value::Number(_) => vec![value],
        serde_json::Value::Array(all) => all.iter_mut().flat_map(numbers).collect(),
        serde_json::Value::Object(all) => all.values_mut().flat_map(numbers).collect(),
        _ => Vec::new(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn no_number_makes_it_panic(changes in prop::collection::vec((any::<prop::sample::Index>(), 0_u32..64, any::<bool>()), 1..20)) {
        let mut json: serde_json::Value = serde_json::from_str(&testing::trace()).unwrap();
        let mut numbers = numbers(&mut json);
        for (at, bits, negative) in changes {
            let n = i64::MAX >> bits;
            let i = at.index(numbers.len());
            *numbers[i] = serde_json::json!(if negative { -n } else { n });
        }
        all(json.to_string().as_bytes());
    }

    #[test]
    fn no_cut_makes_it_panic(end in 0..testing::trace().len()) {
        all(&testing::trace().as_bytes()[..end]);
    }

    #[test]
    fn no_damage_makes_it_panic(at in 0..testing::trace().len(), to: u8, n in 1_usize..40) {
        let mut text = testing::trace().into_bytes();
        let end = (at + n).min(text.len());
        text[at..end].fill(to);
        all(&text);
    }

    #[test]
    fn every_event_is_counted_whatever_is_missing(drop in prop::collection::vec(0_usize..60, 0..20)) {
        let text = testing::trace();
        let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
        let events = json["traceEvents"].as_array_mut().unwrap();
        for at in drop {
            if at < events.len() {
                events.remove(at);
            }
        }
        let n = events.len() as u64;
        let (trace, a) = read(json.to_string().as_bytes()).unwrap();
        prop_assert_eq!(trace.events, n);
        let unmatched: u64 = a.unmatched.values().map(|u| u.0).sum();
        prop_assert_eq!(a.work.len() as u64 + unmatched, trace.device.len() as u64);
    }
}
