//! The profile as text.

use super::{Measured, middle};
use crate::calibrate::render::{CLASSES, Tables, classes, num, rate, tables};
use shardlab_plan::units::DType;
use std::fmt::Write;

/// By data sheet: dense TFLOP/s in float32 and bf16, GB/s of memory, MiB of cache, GB/s of a GPU's links in one direction.
fn sheet(gpu: &str) -> (f64, f64, f64, u64, f64) {
    match gpu {
        g if g.contains("H200") => (67.0, 989.0, 4800.0, 50, 450.0),
        g if g.contains("H100") => (67.0, 989.0, 3350.0, 50, 450.0),
        g if g.contains("B200") => (75.0, 2250.0, 8000.0, 126, 900.0),
        g if g.contains("A100") => (19.5, 312.0, 2039.0, 40, 300.0),
        _ => (60.0, 900.0, 3000.0, 50, 300.0),
    }
}

/// The profile's text.
pub(super) fn profile(name: &str, m: &Measured) -> String {
    let (f32_peak, bf16_peak, gbps, cache, links) = sheet(&m.gpu);
    let driver = format!("{}.{}", m.driver / 1000, m.driver % 1000 / 10);
    let machine = format!("{} {}, CUDA {driver}", m.gpus, m.gpu);
    let source = |what: &str| {
        let what = what.replace(
            "alone",
            "alone, long ones as slow as steps have shown them to be",
        );
        format!("{what}: measured on {machine}, by shardlab calibrate --device cuda")
    };
    let h = &m.host;
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    let positive = |x: f64, otherwise: f64| {
        if x.is_finite() && x > 0.0 {
            x
        } else {
            otherwise
        }
    };
    let bus = m
        .collectives
        .iter()
        .filter(|t| {
            t.ranks == m.gpus && t.kind == shardlab_plan::program::CollectiveKind::AllGather
        })
        .flat_map(|t| &t.rows)
        .map(|(bytes, us)| *bytes as f64 / us / 1e3 * f64::from(m.gpus - 1) / f64::from(m.gpus))
        .fold(0.0, f64::max);
    let w = &m.wires;
    // What one collective reaches may be less than links carry: two at a time divide these.
    let bus = bus.max(w.reach_gbps);
    // A kernel bound by arithmetic loses the multiprocessors that a collective holds; attention is one, too.
    let held = f64::from(m.multiprocessors) * (1.0 - 1.0 / w.product.0.max(1.0));
    let mut out = String::new();
    let _ = write!(
        out,
        r#"name = "{name}"
about = "{machine}, for the CUDA device"

[device]
source = "memory, TFLOP/s: data sheet; {device}"
sms = {sms}
memory_mib = {memory}
memory_gbps = {gbps}
l2_mib = {cache}
tflops = {{ f32 = {f32_peak:?}, bf16 = {bf16_peak:?}, f16 = {bf16_peak:?} }}
kernel_gap_us = {gap}
graph_gap_us = {graph_gap}
launch_latency_us = {latency}
event_latency_us = {event}
min_kernel_us = {shortest}
h2d_gbps = {h2d}
d2h_gbps = {d2h}
copy_latency_us = {copy_latency}

[footprint]
source = "{footprint}"
context_mib = {context}
joined_mib = {joined}
communicator_mib = {communicator}
used_communicators = true
kernel_workspaces = true

[host]
source = "{host}"
launch_us = {launch}
collective_us = {collective}
copy_us = {copy}
event_us = {events}
host_wait_us = {wait}
alloc_us = {alloc}
device_alloc_us = 150.0
graph_launch_us = {graph}
queue_depth = 1024
steps_in_flight = 1

# Host work costs nothing here: the interpreter has no framework. A step ends this much later than its last task.
[host.work]
dispatch_us = 0.0
autograd_dispatch_us = 0.0
guard_us = 0.0
graph_break_us = 0.0
hook_us = 0.0
hook_param_us = 0.0
optimizer_step_us = 0.0
step_us = {tail}

[network]
source = "links: data sheet; {network}; cards: 8 of 50 GB/s are assumed, none was used"
nvlink_gbps = {links:?}
nvlink_efficiency = {efficiency}
nics_per_node = 8
nic_gbps = 50
nic_efficiency = 0.85
nic_latency_us = 8.0
misaligned_factor = 3.0
sms_per_collective = {held}

[contention]
source = "{contention}; start_wait: fitted to 18 pairs of a kernel and a collective on 4 H200 (sim/tests/contention.rs)"
collective_loss_compute = {loss_compute}
collective_loss_bandwidth = {loss_bandwidth}
collective_bandwidth = {bandwidth}
start_wait = 1.0
start_wait_priority = 1.0
start_wait_min_us = 20.0
"#,
        device = source("gaps, latencies, copies"),
        sms = m.multiprocessors,
        memory = m.memory_mib,
        gap = num(positive(h.gap_us, positive(m.steps.gap_us, 1.5))),
        graph_gap = num(positive(h.graph_gap_us, 0.6)),
        latency = num(positive(m.steps.latency_us, 2.5)),
        event = num(m.steps.event_us.max(0.0)),
        shortest = num(positive(m.steps.shortest_us, 2.0)),
        h2d = num(positive(h.h2d_gbps, 50.0)),
        d2h = num(positive(h.d2h_gbps, 50.0)),
        copy_latency = num(positive(h.copy_latency_us, 5.0)),
        footprint = source(
            "device bytes in use beside the engine's and its kernels' workspaces, after steps without communicators, with one and with two"
        ),
        context = mib(m.outside.context),
        joined = mib(m.outside.joined),
        communicator = mib(m.outside.communicator),
        host = source("launches within steps, the interpreter included; the rest on its own"),
        launch = num(positive(h.launch_us, 3.0)),
        collective = num(positive(w.issue_us, 8.0)),
        copy = num(positive(h.copy_us, 3.0)),
        events = num(positive(h.event_us, 1.0)),
        wait = num(positive(h.host_wait_us, 5.0)),
        alloc = num(positive(h.alloc_us, 0.2)),
        graph = num(positive(h.graph_launch_us, 10.0)),
        tail = num(positive(m.steps.tail_us, 10.0).min(500.0)),
        network = source("collectives, one and two at a time"),
        efficiency = num(positive(bus / links, 0.74).min(1.0)),
        held = (held.round() as u32).min(m.multiprocessors / 2),
        contention = source(
            "a product, attention and a kernel bound by memory beside an all-gather of 1 GiB"
        ),
        loss_compute = num((1.0 - 1.0 / w.product.1.min(w.attention.1).max(1.0)).min(0.9)),
        loss_bandwidth =
            num((1.0 / w.product.1.max(1.0) - 1.0 / w.memory.1.max(1.0)).clamp(0.0, 0.9)),
        bandwidth = num((w.memory.0 - 1.0).clamp(0.0, 0.9)),
    );
    if m.power.slope > 0.0 {
        let _ = write!(
            out,
            "\n[power]\nsource = \"{}\"\narithmetic_share = {}\narithmetic_slope = {}\n",
            source("the same kernels in steps of different models and compile modes"),
            num(m.power.share),
            num(m.power.slope),
        );
    }
    efficiency(&mut out, m, &source, (f32_peak, bf16_peak), gbps);
    tables(
        &mut out,
        &Tables {
            source: &source,
            steps: &m.steps,
            gemm: &m.gemm,
            attention: &m.attention,
            collectives: &m.collectives,
            between: "between GPUs, by NCCL",
        },
    );
    out
}

/// Shares of the data sheet's rates, for what the tables do not reach.
fn efficiency(
    out: &mut String,
    m: &Measured,
    source: &dyn Fn(&str) -> String,
    (f32_peak, bf16_peak): (f64, f64),
    gbps: f64,
) {
    let large = |dtype: DType, peak: f64, otherwise: f64| {
        let rows = m.gemm.iter().filter(|t| t.0 == dtype).flat_map(|t| &t.1);
        let mut rates: Vec<f64> = rows
            .filter(|r| r.0.iter().product::<u64>() >= 1 << 32)
            .map(|r| rate(r.0, r.1) / 1e3 / peak)
            .collect();
        let rate = middle(&mut rates);
        if rate.is_finite() {
            rate.min(1.0)
        } else {
            otherwise
        }
    };
    let attention = |backward: bool, otherwise: f64| {
        let products = if backward { 5.0 } else { 2.0 };
        let mut rates: Vec<f64> = m
            .attention
            .iter()
            .filter(|t| t.backward == backward)
            .flat_map(|t| &t.rows)
            // The causal half.
            .map(|([b, h, _, s, d], us)| {
                products * (b * h * s * s * d) as f64 / us / 1e6 / bf16_peak
            })
            .collect();
        let rate = middle(&mut rates);
        if rate.is_finite() {
            rate.min(1.0)
        } else {
            otherwise
        }
    };
    let _ = write!(
        out,
        r#"
[efficiency]
source = "{}"
gemm = {{ f32 = {}, bf16 = {}, f16 = {} }}
conv = 0.7
attention = {}
attention_backward = {}
# Not measured here: 1.22, 1.09 and 1.10 for three shapes on an H200.
attention_backward_fixed_order = 1.1

[efficiency.memory]
"#,
        source("middles of the tables below"),
        num(large(DType::F32, f32_peak, 0.75)),
        num(large(DType::Bf16, bf16_peak, 0.75)),
        num(large(DType::Bf16, bf16_peak, 0.75)),
        num(attention(false, 0.56)),
        num(attention(true, 0.46)),
    );
    let classes = classes(&m.steps);
    for class in CLASSES {
        let mut rates: Vec<f64> = [DType::Bf16, DType::F32]
            .into_iter()
            .filter_map(|d| classes.get(&(class, d)))
            .flatten()
            // Small ones say nothing about rates.
            .filter(|r| r.0 >= 16 << 20)
            .map(|(bytes, us)| *bytes as f64 / us / 1e3 / gbps)
            .collect();
        let share = middle(&mut rates);
        let share = if share.is_finite() { share } else { 0.6 };
        let _ = writeln!(out, "{class} = {}", num(share.clamp(1e-3, 1.0)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nothing measured leaves a profile of sensible numbers: no NaN, no infinity.
    #[test]
    fn a_profile_of_nothing_has_numbers_everywhere() {
        let m = Measured {
            gpu: "NVIDIA H200".to_owned(),
            gpus: 1,
            multiprocessors: 132,
            ..Measured::default()
        };
        let text = profile("nothing", &m);
        assert!(!text.contains("NaN") && !text.contains("inf\n"), "{text}");
        assert!(text.contains("memory_gbps = 4800\n"), "{text}");
        if let Ok(path) = std::env::var("SHARDLAB_PROFILE_OUT") {
            std::fs::write(path, text).unwrap();
        }
    }
}
