//! Formats the profile of GPUs.

use super::{Measured, middle};
use crate::calibrate::render::{
    Tables, Taken, by_dtype, classes, memory_shares, no_framework, num, rate, tables,
};
use shardlab_plan::hardware::{MEMORY_CLASSES, SectionText};
use shardlab_plan::ir::{CollectiveKind, DType, Float8Gemm, GemmKind};

/// Dense TFLOP/s in float32 and in bf16, and in 8 bits if the GPU has such tensor cores; GB/s of
/// memory; MiB of cache; and GB/s of a GPU's links per direction.
type Sheet = (f64, f64, Option<f64>, f64, u64, f64);

/// Returns the data sheet of a GPU by the exact name that the driver reports, because other GPUs of
/// the same family have other numbers.
fn sheet(gpu: &str) -> Option<Sheet> {
    match gpu {
        "NVIDIA H200" => Some((67.0, 989.0, Some(1979.0), 4800.0, 50, 450.0)),
        "NVIDIA H100 80GB HBM3" => Some((67.0, 989.0, Some(1979.0), 3350.0, 50, 450.0)),
        "NVIDIA B200" => Some((75.0, 2250.0, Some(4500.0), 8000.0, 126, 900.0)),
        "NVIDIA A100-SXM4-80GB" => Some((19.5, 312.0, None, 2039.0, 40, 300.0)),
        _ => None,
    }
}

/// Values for a GPU without a known data sheet.
const ASSUMED: Sheet = (60.0, 900.0, Some(1800.0), 3000.0, 50, 300.0);

/// Describes GPUs and driver.
fn machine(m: &Measured) -> String {
    let driver = format!("{}.{}", m.driver / 1000, m.driver % 1000 / 10);
    format!("{} {}, CUDA {driver}", m.gpus, m.gpu)
}

/// Describes what was measured, where and how.
pub(super) fn source(m: &Measured, what: &str) -> String {
    let machine = machine(m);
    let what = what.replace("alone", "alone, long kernels slowed down as within steps");
    format!("{what}: measured on {machine}, by shardlab calibrate --device cuda")
}

/// Returns the text of the profile.
pub(super) fn profile(name: &str, m: &Measured) -> String {
    let known = sheet(&m.gpu);
    let mut sheet = known.unwrap_or(ASSUMED);
    // Without a way to scale 8-bit matmuls, the device runs none of them.
    sheet.2 = sheet.2.filter(|_| !m.scalings.is_empty());
    let origin = if known.is_some() {
        "data sheet"
    } else {
        "assumed: the data sheet of this GPU is unknown"
    };
    let source = |what: &str| source(m, what);
    let mut out = String::new();
    SectionText::new("")
        .text("name", name)
        .text("about", format_args!("{}, for the CUDA device", machine(m)))
        .write(&mut out);
    SectionText::new("measured")
        .text("on", format_args!("{} x {}, shardlab exec", m.gpus, m.gpu))
        .set("gpus", m.gpus)
        .write(&mut out);
    device(&mut out, m, sheet, origin);
    footprint(&mut out, m);
    host(&mut out, m);
    network(&mut out, m, sheet.5, origin);
    contention(&mut out, m);
    power(&mut out, m);
    efficiency(&mut out, m, &source, sheet);
    tables(
        &mut out,
        &Tables {
            source: &source,
            steps: &m.steps,
            gemm: &m.gemm,
            grouped: &m.grouped,
            attention: &m.attention,
            collectives: &m.collectives,
            between: "between GPUs, by NCCL",
        },
    );
    out
}

fn device(out: &mut String, m: &Measured, sheet: Sheet, origin: &str) {
    let (f32_peak, bf16_peak, float8_peak, gbps, cache, _) = sheet;
    let h = &m.host;
    let mut d = Taken::default();
    let gap = if h.gap_us > 0.0 {
        h.gap_us
    } else {
        m.steps.gap_us
    };
    let gap = d.positive("kernel_gap_us", gap, 1.5);
    let graph_gap = d.positive("graph_gap_us", h.graph_gap_us, 0.6);
    let latency = d.positive("launch_latency_us", m.steps.latency_us, 2.5);
    let event = d.positive("event_latency_us", m.steps.event_us, 0.0);
    let shortest = d.positive("min_kernel_us", m.steps.shortest_us, 2.0);
    let [h2d, d2h] = [("h2d_gbps", 0), ("d2h_gbps", 1)]
        .map(|(key, i)| d.of(key, m.copies.map(|copies| copies.gbps[i]), 50.0));
    let copy_latency = d.positive("copy_latency_us", h.copy_latency_us, 5.0);
    SectionText::new("device")
        .text(
            "source",
            format_args!(
                "memory, TFLOP/s: {origin}; {}",
                d.source(source(m, "gaps, latencies, copies"))
            ),
        )
        .set("sms", m.multiprocessors)
        .set("memory_mib", m.memory_mib)
        .set("memory_gbps", gbps)
        .set("l2_mib", cache)
        .set(
            "tflops",
            by_dtype(
                &format!("{f32_peak:?}"),
                &format!("{bf16_peak:?}"),
                float8_peak.map(|peak| format!("{peak:?}")).as_deref(),
            ),
        )
        .set("kernel_gap_us", num(gap))
        .set("graph_gap_us", num(graph_gap))
        .set("launch_latency_us", num(latency))
        .set("event_latency_us", num(event))
        .set("min_kernel_us", num(shortest))
        .set("h2d_gbps", num(h2d))
        .set("d2h_gbps", num(d2h))
        .set("copy_latency_us", num(copy_latency))
        .write(out);
}

fn footprint(out: &mut String, m: &Measured) {
    let mut f = Taken::default();
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    let seen_together = m.gpus > 1 && m.outside.context > 0;
    let together = |bytes: u64| seen_together.then(|| mib(bytes) as f64);
    let context = f.positive("context_mib", mib(m.outside.context) as f64, 0.0);
    let joined = f.of("joined_mib", together(m.outside.joined), 0.0);
    let communicator = f.of("communicator_mib", together(m.outside.communicator), 0.0);
    // If they were not measured, the value is that of other communicators.
    let engines = m.outside.engines.and_then(together);
    let engines = f.of("copy_engine_communicator_mib", engines, communicator);
    // If they are not known separately, `joined_mib` includes them.
    let kernels = m.outside.kernels.and_then(together);
    let kernels = f.of("collective_kernels_mib", kernels, 0.0);
    SectionText::new("footprint")
        .text(
            "source",
            f.source(source(
                m,
                "device bytes in use in addition to the engine's and its kernels' workspaces, after steps without communicators, with two on copy engines, with one, with two, and with one of two on copy engines",
            )),
        )
        .set("context_mib", context)
        .set("joined_mib", joined)
        .set("communicator_mib", communicator)
        .set("copy_engine_communicator_mib", engines)
        .set("collective_kernels_mib", kernels)
        .set("used_communicators", true)
        .set("kernel_workspaces", true)
        .write(out);
}

fn host(out: &mut String, m: &Measured) {
    let h = &m.host;
    let mut issue = Taken::default();
    let launch = issue.positive("launch_us", h.launch_us, 3.0);
    let collective = issue.positive("collective_us", m.wires.issue_us, 8.0);
    let copy = issue.positive("copy_us", h.copy_us, 3.0);
    let events = issue.positive("event_us", h.event_us, 1.0);
    let wait = issue.positive("host_wait_us", h.host_wait_us, 5.0);
    let alloc = issue.positive("alloc_us", h.alloc_us, 0.2);
    let device_alloc = issue.of("device_alloc_us", None, 150.0);
    let graph = issue.positive("graph_launch_us", h.graph_launch_us, 10.0);
    let tail = issue.positive("step_us", m.steps.tail_us, 10.0).min(500.0);
    SectionText::new("host")
        .text(
            "source",
            issue.source(source(
                m,
                "launches within steps, including the interpreter; everything else separately",
            )),
        )
        .set("launch_us", num(launch))
        .set("collective_us", num(collective))
        .set("copy_us", num(copy))
        .set("event_us", num(events))
        .set("host_wait_us", num(wait))
        .set("alloc_us", num(alloc))
        .set("device_alloc_us", num(device_alloc))
        .set("graph_launch_us", num(graph))
        .set("queue_depth", 1024)
        .set("steps_in_flight", 1)
        .write(out);
    no_framework(tail, out);
}

/// Returns `x` if all pairs were measured. Factors that were not measured are 0 or 1.
fn seen(pairs: &[(f64, f64)], x: f64) -> Option<f64> {
    let all = pairs.iter().all(|p| p.0 > 0.0 && *p != (1.0, 1.0));
    all.then_some(x)
}

/// Writes the section of links, which carry `links` GB/s per direction.
fn network(out: &mut String, m: &Measured, links: f64, origin: &str) {
    let alone = m
        .collectives
        .iter()
        .filter(|t| t.ranks == m.gpus && t.kind == CollectiveKind::AllGather)
        .flat_map(|t| &t.rows)
        .map(|(bytes, us)| *bytes as f64 / us / 1e3 * f64::from(m.gpus - 1) / f64::from(m.gpus))
        .fold(0.0, f64::max);
    let w = &m.wires;
    // A single collective may reach less than the links carry. The rate of two concurrent
    // collectives is divided between them.
    let reached = alone.max(w.reach_gbps);
    // A kernel bound by arithmetic, including attention, loses the multiprocessors that a
    // collective occupies.
    let held = f64::from(m.multiprocessors) * (1.0 - 1.0 / w.product.0.max(1.0));
    let mut n = Taken::default();
    let efficient = n
        .positive("nvlink_efficiency", reached / links, 0.74)
        .min(1.0);
    let held = n.of("sms_per_collective", seen(&[w.product], held), 0.0);
    SectionText::new("network")
        .text(
            "source",
            format_args!(
                "links: {origin}; {}; cards: 8 of 50 GB/s are assumed, none was used",
                n.source(source(m, "collectives, one and two at a time"))
            ),
        )
        .set("nvlink_gbps", format_args!("{links:?}"))
        .set("nvlink_efficiency", num(efficient))
        // With two concurrent collectives, two ranks reach the rate that four ranks reach with one
        // (334 and 327 GB/s on H100s and H200s).
        .set("nvlink_ranks", m.gpus.max(4))
        .set("nics_per_node", 8)
        .set("nic_gbps", 50)
        .set("nic_efficiency", 0.85)
        .set("nic_latency_us", "8.0")
        .set("misaligned_factor", "1.6")
        .set("misaligned_reduction_factor", "1.15")
        .set(
            "sms_per_collective",
            (held.round() as u32).min(m.multiprocessors / 2),
        )
        .write(out);
}

fn contention(out: &mut String, m: &Measured) {
    let w = &m.wires;
    let mut c = Taken::default();
    let loss_compute = 1.0 - 1.0 / w.product.1.min(w.attention.1).max(1.0);
    let loss_bandwidth = 1.0 / w.product.1.max(1.0) - 1.0 / w.memory.1.max(1.0);
    let loss_compute = c.of(
        "collective_loss_compute",
        seen(&[w.product, w.attention], loss_compute.min(0.9)),
        0.0,
    );
    let loss_bandwidth = c.of(
        "collective_loss_bandwidth",
        seen(&[w.product, w.memory], loss_bandwidth.clamp(0.0, 0.9)),
        0.0,
    );
    let bandwidth = c.of(
        "collective_bandwidth",
        seen(&[w.memory], (w.memory.0 - 1.0).clamp(0.0, 0.9)),
        0.0,
    );
    let [h2d_loss, d2h_loss] = [("h2d_loss", 0), ("d2h_loss", 1)]
        .map(|(key, i)| c.of(key, m.copies.map(|copies| copies.loss[i]), 0.0));
    let measured = c.source(source(
        m,
        "a matmul, attention and a memory-bound kernel next to an all-gather of 1 GiB, copies both ways",
    ));
    SectionText::new("contention")
        .text(
            "source",
            format_args!(
                "{measured}; start_wait: fitted to 18 pairs of a kernel and a collective on 4 H200 (sim/tests/contention.rs)"
            ),
        )
        .set("collective_loss_compute", num(loss_compute))
        .set("collective_loss_bandwidth", num(loss_bandwidth))
        .set("collective_bandwidth", num(bandwidth))
        .set("start_wait", "1.0")
        .set("start_wait_priority", "1.0")
        .set("start_wait_min_us", "20.0")
        .set("h2d_loss", num(h2d_loss))
        .set("d2h_loss", num(d2h_loss))
        .write(out);
}

fn power(out: &mut String, m: &Measured) {
    if m.power.slope > 0.0 {
        let how = "the same kernels in steps of different models and compile modes";
        let mut section = SectionText::new("power")
            .text("source", source(m, how))
            .set("arithmetic_share", num(m.power.share))
            .set("arithmetic_slope", num(m.power.slope));
        if let Some(slope) = m.power.float8_slope {
            section = section.set("float8_slope", num(slope));
        }
        section.write(out);
    }
}

/// Returns shares of the data sheet's rates, for sizes beyond the tables.
fn efficiency(
    out: &mut String,
    m: &Measured,
    source: &dyn Fn(&str) -> String,
    (f32_peak, bf16_peak, float8_peak, gbps, ..): Sheet,
) {
    let share = |mut rates: Vec<f64>| {
        let middle = middle(&mut rates);
        middle.is_finite().then(|| middle.min(1.0))
    };
    let is_large = |shape: &[u64; 3]| shape.iter().product::<u64>() >= 1 << 32;
    let of = |kind: GemmKind| {
        m.gemm
            .iter()
            .filter(move |t| t.0 == kind)
            .flat_map(|t| &t.1)
    };
    let large = |dtype: DType, peak: f64| {
        let rows = of(GemmKind::of(dtype));
        let large = rows.filter(|r| is_large(&r.0));
        share(large.map(|r| rate(r.0, r.1) / 1e3 / peak).collect())
    };
    let conv = m
        .steps
        .conv
        .iter()
        .filter(|((_, shape), _)| is_large(shape));
    let conv = conv.map(|((dtype, shape), t)| {
        let peak = if *dtype == DType::F32 {
            f32_peak
        } else {
            bf16_peak
        };
        let product = large(*dtype, peak).unwrap_or(0.75);
        rate(*shape, t.us()) / 1e3 / peak / product
    });
    let conv = share(conv.collect());
    let attention = |backward: bool| {
        let rows = m.attention.iter().filter(|t| t.backward == backward);
        let rates = rows
            .flat_map(|t| &t.rows)
            .map(|(s, us)| s.flops(backward) as f64 / us / 1e6 / bf16_peak);
        share(rates.collect())
    };
    let mut taken = Taken::default();
    let f32s = taken.of("gemm.f32", large(DType::F32, f32_peak), 0.75);
    let bf16s = taken.of("gemm.bf16", large(DType::Bf16, bf16_peak), 0.75);
    let float8s = float8_peak.map(|peak| {
        // 1.75 times the rate of bf16, as in profiles that were not measured.
        let otherwise = (1.75 * bf16s * bf16_peak / peak).min(1.0);
        taken.of("gemm.f8e4m3", large(DType::F8E4m3, peak), otherwise)
    });
    let full = float8s.map(|_| {
        let otherwise = 1.06;
        taken.of("float8_full_accumulation", full_accumulation(m), otherwise)
    });
    let conv = taken.of("conv", conv, 0.7);
    let forward = taken.of("attention", attention(false), 0.56);
    let backward = taken.of("attention_backward", attention(true), 0.46);
    let fixed_order = taken.of("attention_backward_fixed_order", m.fixed_order, 1.1);
    let order = if m.fixed_order.is_some() {
        "Deterministic over nondeterministic backward, median over shapes."
    } else {
        "Not measured here: 1.22, 1.09 and 1.10 for three shapes on an H200."
    };
    let classes = classes(&m.steps);
    let memory = MEMORY_CLASSES.map(|class| {
        let rates = [DType::Bf16, DType::F32]
            .into_iter()
            .filter_map(|d| classes.get(&(class, d)))
            .flatten()
            // Small kernels are not representative of rates.
            .filter(|r| r.0 >= 16 << 20)
            .map(|(bytes, us)| *bytes as f64 / us / 1e3 / gbps);
        taken.of(class, share(rates.collect()), 0.6)
    });
    let float8s = float8s.map(num);
    let mut section = SectionText::new("efficiency")
        .text(
            "source",
            taken.source(source("medians of the tables below")),
        )
        .set(
            "gemm",
            by_dtype(&num(f32s), &num(bf16s), float8s.as_deref()),
        );
    if let Some(full) = full {
        section = section.set("float8_full_accumulation", num(full));
    }
    section
        .set("conv", num(conv))
        .set("attention", num(forward))
        .set("attention_backward", num(backward))
        .explained("attention_backward_fixed_order", num(fixed_order), order)
        .write(out);
    memory_shares(memory, out);
}

/// Returns the time of 8-bit matmuls with float32 accumulation, relative to those of the same shape
/// without it: the median over shapes.
fn full_accumulation(m: &Measured) -> Option<f64> {
    let of = |fast_accum| {
        let of = GemmKind {
            dtype: DType::F8E4m3,
            float8: Some(Float8Gemm {
                fast_accum,
                ..Float8Gemm::FASTEST
            }),
        };
        m.gemm.iter().find(|t| t.0 == of).map(|t| &t.1)
    };
    let (fast, full) = (of(true)?, of(false)?);
    let ratio = |(shape, us): &([u64; 3], f64)| {
        let (_, full) = full.iter().find(|r| r.0 == *shape)?;
        Some(full / us)
    };
    let mut ratios: Vec<f64> = fast.iter().filter_map(ratio).collect();
    Some(middle(&mut ratios).max(1.0)).filter(|r| r.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardlab_plan::ir::ScaleMode;

    /// A profile without measurements has valid numbers, without NaN or infinity.
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
            std::fs::write(path, &text).unwrap();
        }
        // Only the sources of the tables and of the GPU say `measured`.
        assert!(!text.contains("measured on"), "{text}");
        for key in [
            "collective_us",
            "nvlink_efficiency",
            "collective_loss_compute",
            "device_alloc_us",
            "conv",
            "attention_backward",
            "pointwise",
        ] {
            assert!(
                text.contains(&format!(", {key}")) || text.contains(&format!(": {key}")),
                "{key}"
            );
        }
    }

    #[test]
    fn what_was_measured_is_not_assumed() {
        let mut m = Measured {
            gpu: "NVIDIA GH200 480GB".to_owned(),
            gpus: 4,
            multiprocessors: 132,
            ..Measured::default()
        };
        m.host.launch_us = 9.0;
        m.wires.reach_gbps = 300.0;
        m.wires.product = (1.2, 1.1);
        m.wires.memory = (1.3, 1.4);
        let text = profile("some", &m);
        let source = |section: &str| {
            let at = text.find(&format!("\n[{section}]\n")).unwrap();
            let line = text[at..].lines().nth(2).unwrap();
            line.strip_prefix("source = ").unwrap().to_owned()
        };
        assert!(
            source("host").contains("measured on 4 NVIDIA GH200")
                && source("host").contains("assumed, not measured: collective_us, copy_us"),
            "{}",
            source("host")
        );
        assert!(
            source("contention")
                .contains("assumed, not measured: collective_loss_compute, h2d_loss, d2h_loss;"),
            "{}",
            source("contention")
        );
        let network = source("network");
        assert!(
            network.contains("links: assumed: the data sheet of this GPU"),
            "{network}"
        );
        assert!(!network.contains("not measured"), "{network}");
        // Another data sheet than that of the H200.
        assert!(text.contains("memory_gbps = 3000\n"), "{text}");
        assert!(source("device").contains("TFLOP/s: assumed"), "{text}");
    }

    /// For a GPU with 8-bit matmuls, the profile has a table per recipe and accumulation, and their
    /// medians. For other GPUs, it has none of these.
    #[test]
    fn matmuls_in_8_bits_are_by_recipe_and_sums() {
        let kind = |scaling, fast_accum| GemmKind {
            dtype: DType::F8E4m3,
            float8: Some(Float8Gemm {
                scaling,
                fast_accum,
            }),
        };
        let shape = [8192, 4096, 4096];
        let of = |us| vec![(shape, us), ([8192, 4096, 8192], 2.0 * us)];
        let mut m = Measured {
            gpu: "NVIDIA H200".to_owned(),
            gpus: 1,
            multiprocessors: 132,
            memory_mib: 140_000,
            scalings: vec![ScaleMode::Tensorwise, ScaleMode::Rowwise],
            gemm: vec![
                (kind(ScaleMode::Tensorwise, true), of(200.0)),
                (kind(ScaleMode::Tensorwise, false), of(210.0)),
                (kind(ScaleMode::Rowwise, true), of(205.0)),
            ],
            ..Measured::default()
        };
        m.power = super::super::warm::Power {
            share: 0.6,
            slope: 0.2,
            float8_slope: Some(0.1),
        };
        let text = profile("eight", &m);
        for line in [
            "tflops = { f32 = 67.0, bf16 = 989.0, f16 = 989.0, f8e4m3 = 1979.0 }",
            "gemm = { f32 = 0.75, bf16 = 0.75, f16 = 0.75, f8e4m3 = 0.6945 }",
            "float8_full_accumulation = 1.05",
            "float8_slope = 0.1",
        ] {
            assert!(text.contains(&format!("\n{line}\n")), "{line}: {text}");
        }
        let slow = text.split("[[gemm]]").nth(2).unwrap();
        let keys = "dtype = \"f8e4m3\"\nscaling = \"tensorwise\"\nfast_accum = false\nrows = [\n    [8192, 4096, 4096, 210.0]";
        assert!(slow.contains(keys), "{slow}");
        shardlab_plan::hardware::check(&text).unwrap();
        m.scalings.clear();
        m.gemm.clear();
        let without = profile("none", &m);
        assert!(!without.contains("f8e4m3 =") && !without.contains("float8_full"));
    }

    /// The cost of a fixed order is marked as measured only if it was measured.
    #[test]
    fn a_fixed_order_has_a_price_and_its_origin() {
        let lines = |fixed_order| {
            let m = Measured {
                fixed_order,
                ..Measured::default()
            };
            let text = profile("some", &m);
            let key = "attention_backward_fixed_order";
            let at = text.find(&format!("\n{key} = ")).unwrap();
            let comment = text[..at].lines().last().unwrap().to_owned();
            let value = text[at + 1..].lines().next().unwrap().to_owned();
            let section = text.find("\n[efficiency]\n").unwrap();
            let source = text[section..].lines().nth(2).unwrap();
            (comment, value, source.contains(key))
        };
        let (comment, value, assumed) = lines(Some(1.0954));
        assert!(
            comment.starts_with("# Deterministic over nondeterministic backward"),
            "{comment}"
        );
        assert_eq!(value, "attention_backward_fixed_order = 1.095");
        assert!(!assumed);
        let (comment, value, assumed) = lines(None);
        assert!(comment.starts_with("# Not measured here"), "{comment}");
        assert_eq!(value, "attention_backward_fixed_order = 1.1");
        assert!(assumed);
    }

    /// A communicator on copy engines has its own size if it was measured, or else that of other
    /// communicators, and the source says which. The same applies to the kernels of collectives,
    /// which are otherwise included in `joined_mib`.
    #[test]
    fn communicators_on_copy_engines_and_kernels_of_collectives_are_reported() {
        let line = |engines, kernels| {
            let mut m = Measured {
                gpus: 2,
                ..Measured::default()
            };
            m.outside = super::super::Outside {
                context: 600 << 20,
                joined: 133 << 20,
                communicator: 519 << 20,
                engines,
                kernels,
            };
            let text = profile("some", &m);
            let section = text.split("\n[").find(|s| s.starts_with("footprint]"));
            let section = section.unwrap().to_owned();
            let value = |key: &str| {
                let line = section.lines().find_map(|l| l.strip_prefix(key));
                line.unwrap().trim_start_matches(" = ").to_owned()
            };
            let assumed = section.split_once("assumed, not measured: ");
            let assumed = assumed.map_or("", |a| a.1.lines().next().unwrap());
            (
                value("copy_engine_communicator_mib"),
                value("collective_kernels_mib"),
                assumed.trim_end_matches('"').to_owned(),
            )
        };
        let reported = |a: &str, b: &str, c: &str| (a.to_owned(), b.to_owned(), c.to_owned());
        let engines = Some((258 << 20) - 5);
        assert_eq!(line(engines, Some(171 << 20)), reported("258", "171", ""));
        assert_eq!(
            line(engines, None),
            reported("258", "0", "collective_kernels_mib")
        );
        assert_eq!(
            line(None, None),
            reported(
                "519",
                "0",
                "copy_engine_communicator_mib, collective_kernels_mib"
            )
        );
    }

    /// The driver's names of other GPUs in the same families.
    #[test]
    fn data_sheets_are_those_of_exactly_one_gpu() {
        assert!(sheet("NVIDIA H100 80GB HBM3").is_some());
        for other in ["NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA GH200 480GB"] {
            assert!(sheet(other).is_none(), "{other}");
        }
    }
}
