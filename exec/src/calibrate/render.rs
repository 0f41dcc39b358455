//! Formats the profile of a CPU.

use super::collectives::Table;
use super::grid::{AttentionRows, DTYPES, GemmTable, GroupedKind, GroupedRows, GroupedSizes};
use super::steps::Totals;
use super::{Measured, Together};
use shardlab_plan::hardware::{MEMORY_CLASSES, SectionText};
use shardlab_plan::ir::{AttentionShape, DType, GemmKind};
use std::collections::BTreeMap;

/// The source of a section's numbers, with the names of values that were not measured.
#[derive(Debug, Default)]
pub(super) struct Taken {
    measured: bool,
    assumed: Vec<&'static str>,
}

impl Taken {
    /// Returns a measured number, or an assumed one.
    pub(super) fn of(&mut self, key: &'static str, x: Option<f64>, otherwise: f64) -> f64 {
        self.measured |= x.is_some();
        if x.is_none() {
            self.assumed.push(key);
        }
        x.unwrap_or(otherwise)
    }

    /// Like [`of`](Self::of), for values that must be above 0.
    pub(super) fn positive(&mut self, key: &'static str, x: f64, otherwise: f64) -> f64 {
        self.of(
            key,
            Some(x).filter(|x| x.is_finite() && *x > 0.0),
            otherwise,
        )
    }

    /// Returns the section's source. `measured` describes how the values were measured.
    pub(super) fn source(&self, measured: String) -> String {
        let assumed = format!("assumed, not measured: {}", self.assumed.join(", "));
        match (self.measured, &self.assumed[..]) {
            (_, []) => measured,
            (false, _) => assumed,
            (true, _) => format!("{measured}; {assumed}"),
        }
    }
}

/// Number of rows of a table per line.
const ON_A_LINE: usize = 5;

/// Rounds to four significant digits.
pub(super) fn num(x: f64) -> String {
    let digits = 3 - x.abs().max(1e-9).log10().floor() as i32;
    let text = format!("{x:.*}", digits.clamp(0, 6) as usize);
    if text.contains('.') {
        let short = text.trim_end_matches('0').trim_end_matches('.');
        if short.contains('.') {
            short.to_owned()
        } else {
            format!("{short}.0")
        }
    } else {
        format!("{text}.0")
    }
}

/// Formats rows, a few per line.
fn rows(rows: impl IntoIterator<Item = String>) -> String {
    let rows: Vec<String> = rows.into_iter().map(|r| format!("[{r}],")).collect();
    let lines = rows.chunks(ON_A_LINE);
    let lines = lines.map(|line| format!("    {}\n", line.join(" ")));
    format!("[\n{}]", lines.collect::<String>())
}

fn by_bytes(list: &[(u64, f64)]) -> String {
    let list: Vec<String> = list
        .iter()
        .map(|(b, us)| format!("[{b}, {}]", num(*us)))
        .collect();
    format!("[{}]", list.join(", "))
}

/// Returns the GFLOP/s of a GEMM.
pub(super) fn rate([m, n, k]: [u64; 3], us: f64) -> f64 {
    2.0 * (m * n * k) as f64 / us / 1e3
}

/// Inputs of the measured tables.
pub(super) struct Tables<'a> {
    /// Returns the source text for values from a given measurement.
    pub(super) source: &'a dyn Fn(&str) -> String,
    pub(super) steps: &'a Totals,
    pub(super) gemm: &'a [GemmTable],
    pub(super) grouped: &'a [GroupedRows],
    pub(super) attention: &'a [AttentionRows],
    pub(super) collectives: &'a [Table],
    /// Description of the ranks of collectives.
    pub(super) between: &'static str,
}

/// Rows of one kind of kernel. Those with equal bytes are averaged.
type Rows = BTreeMap<u64, (f64, f64)>;

/// Returns the rows of all kernels, by class and element type.
pub(super) fn classes(steps: &Totals) -> BTreeMap<(&'static str, DType), Vec<(u64, f64)>> {
    let mut all: BTreeMap<(&'static str, DType), Rows> = BTreeMap::new();
    for ((class, _, dtype), table) in &steps.memory {
        let rows = all.entry((class, *dtype)).or_default();
        for (&bytes, mean) in table {
            let row = rows.entry(bytes).or_default();
            *row = (row.0 + mean.us(), row.1 + 1.0);
        }
    }
    let mean = |rows: Rows| rows.into_iter().map(|(b, (s, n))| (b, s / n)).collect();
    all.into_iter().map(|(k, rows)| (k, mean(rows))).collect()
}

/// Returns the text of the profile.
pub(super) fn profile(name: &str, m: &Measured, together: Together) -> String {
    let machine = &m.machine;
    let mut out = String::new();
    let described = format!("{} cores of {}", machine.cores, machine.model);
    SectionText::new("")
        .text("name", name)
        .text(
            "about",
            format_args!("{described}, ranks as threads, for the built-in CPU device"),
        )
        .write(&mut out);
    SectionText::new("measured")
        .text("on", format_args!("{described}, shardlab exec"))
        .set(
            "gpus",
            m.collectives.iter().map(|t| t.ranks).max().unwrap_or(1),
        )
        .write(&mut out);
    // Bytes read and written.
    let memory_gbps = 2.0 * machine.copy_gbps;
    device(&mut out, m, memory_gbps);
    SectionText::new("footprint")
        .text("source", "no device outside the process")
        .set("context_mib", 0)
        .set("communicator_mib", 0)
        .write(&mut out);
    host(&mut out, m);
    network(&mut out, m);
    contention(&mut out, m, together);
    efficiency(&mut out, m, memory_gbps);
    tables(
        &mut out,
        &Tables {
            source: &|what| machine.source(what),
            steps: &m.steps,
            gemm: &m.gemm,
            grouped: &[],
            attention: &m.attention,
            collectives: &m.collectives,
            between: "between rank threads",
        },
    );
    out
}

fn device(out: &mut String, m: &Measured, memory_gbps: f64) {
    let (s, machine) = (&m.steps, &m.machine);
    let peak = |dtype: DType| {
        let table = m.gemm.iter().find(|t| t.0 == GemmKind::of(dtype));
        let rates = table.into_iter().flat_map(|t| &t.1).map(|r| rate(r.0, r.1));
        num(rates.fold(1.0, f64::max) / 1e3)
    };
    let copy = num(machine.copy_gbps);
    let gap = num(s.gap_us);
    SectionText::new("device")
        .text(
            "source",
            machine.source("gaps, latencies, rates of matmuls and copies"),
        )
        .set("sms", 1)
        .set("shared_cores", machine.cores)
        .set("memory_mib", machine.memory_mib)
        .set("memory_gbps", num(memory_gbps))
        .set("l2_mib", machine.cache_mib)
        .set(
            "tflops",
            by_dtype(&peak(DType::F32), &peak(DType::Bf16), None),
        )
        .set("kernel_gap_us", &gap)
        .set("graph_gap_us", &gap)
        .set("launch_latency_us", num(s.latency_us))
        .set("event_latency_us", num(s.event_us))
        .set("min_kernel_us", num(s.shortest_us.max(0.01)))
        .set("h2d_gbps", &copy)
        .set("d2h_gbps", &copy)
        .set("copy_latency_us", num(machine.copy_latency_us.max(0.01)))
        .write(out);
}

fn host(out: &mut String, m: &Measured) {
    let s = &m.steps;
    let [launch, event, alloc] = s.issue_us.map(num);
    SectionText::new("host")
        .text("source", m.machine.source("issue times of recorded steps"))
        .set("launch_us", &launch)
        .set("collective_us", &launch)
        .set("copy_us", &launch)
        .set("event_us", event)
        .set("host_wait_us", num(s.latency_us))
        .set("alloc_us", &alloc)
        .set("device_alloc_us", &alloc)
        .set("graph_launch_us", &launch)
        .set("queue_depth", 1024)
        .set("steps_in_flight", 1)
        .write(out);
    no_framework(s.tail_us, out);
}

fn network(out: &mut String, m: &Measured) {
    SectionText::new("network")
        .text(
            "source",
            m.machine
                .source("copies between rank threads; cards are assumed, none is used"),
        )
        .set("nvlink_gbps", num(m.machine.copy_gbps))
        .set("nvlink_efficiency", "1.0")
        .set("nics_per_node", 1)
        .set("nic_gbps", 1.25)
        .set("nic_efficiency", 0.85)
        .set("nic_latency_us", "30.0")
        .set("misaligned_factor", "1.0")
        .set("sms_per_collective", 0)
        .write(out);
}

fn contention(out: &mut String, m: &Measured, together: Together) {
    let source = if m.steps.trials.is_empty() {
        "assumed, not measured".to_owned()
    } else {
        m.machine
            .source("whole steps of several ranks compared with their prediction")
    };
    SectionText::new("contention")
        .text("source", source)
        .set("collective_loss_compute", "0.0")
        .set("collective_loss_bandwidth", "0.0")
        .set("collective_bandwidth", "0.0")
        .set("start_wait", "0.0")
        .set("start_wait_priority", "0.0")
        .set("start_wait_min_us", "20.0")
        .set("shared_loss", num(together.shared_loss))
        .set("turn_loss", num(together.turn_loss))
        .set("shared_wait_us", num(together.wait_us))
        .write(out);
}

/// Formats a number for each element type. 16-bit types have the same number.
pub(super) fn by_dtype(f32s: &str, bf16s: &str, float8s: Option<&str>) -> String {
    let float8s = float8s.map_or(String::new(), |x| format!(", f8e4m3 = {x}"));
    format!("{{ f32 = {f32s}, bf16 = {bf16s}, f16 = {bf16s}{float8s} }}")
}

/// Formats the host work of a framework for programs without one. A step ends `tail_us`
/// microseconds after its last task.
pub(super) fn no_framework(tail_us: f64, out: &mut String) {
    let work = SectionText::new("host.work");
    let none = [
        "dispatch_us",
        "autograd_dispatch_us",
        "guard_us",
        "graph_break_us",
        "hook_us",
        "hook_param_us",
        "optimizer_step_us",
    ];
    none.into_iter()
        .fold(work, |work, key| work.set(key, "0.0"))
        .explained(
            "step_us",
            num(tail_us),
            "There is no framework. The end of a step is noticed this much later than that of its last task.",
        )
        .write(out);
}

/// Formats the shares of memory bandwidth that classes reach.
pub(super) fn memory_shares(shares: [f64; MEMORY_CLASSES.len()], out: &mut String) {
    let section = SectionText::new("efficiency.memory");
    let all = MEMORY_CLASSES.into_iter().zip(shares);
    all.fold(section, |s, (class, share)| {
        s.set(class, num(share.clamp(1e-3, 1.0)))
    })
    .write(out);
}

/// Formats all measured tables.
pub(super) fn tables(out: &mut String, t: &Tables<'_>) {
    products(out, t);
    attention(out, t);
    memory_classes(out, t);
    memory(out, t);
    collectives(out, t);
}

/// Formats only the tables of kernels, as text that precedes a profile's own tables. The profile's
/// values for whole classes do not change.
pub(super) fn added(steps: &Totals, source: &dyn Fn(&str) -> String) -> String {
    let mut out = String::new();
    let t = Tables {
        source,
        steps,
        gemm: &[],
        grouped: &[],
        attention: &[],
        collectives: &[],
        between: "",
    };
    products(&mut out, &t);
    attention(&mut out, &t);
    memory(&mut out, &t);
    out
}

fn efficiency(out: &mut String, m: &Measured, memory_gbps: f64) {
    let middle = |mut x: Vec<f64>| -> Option<f64> {
        x.sort_by(f64::total_cmp);
        x.get(x.len() / 2).copied()
    };
    let peak = |dtype: DType| {
        let rows = m
            .gemm
            .iter()
            .filter(|t| t.0 == GemmKind::of(dtype))
            .flat_map(|t| &t.1);
        rows.map(|r| rate(r.0, r.1)).fold(1.0, f64::max)
    };
    let large = |dtype: DType| {
        let rows = m
            .gemm
            .iter()
            .filter(|t| t.0 == GemmKind::of(dtype))
            .flat_map(|t| &t.1);
        let rates = rows
            .filter(|r| r.0.iter().product::<u64>() >= 1 << 20)
            .map(|r| rate(r.0, r.1) / peak(dtype));
        middle(rates.collect())
    };
    let attention = |backward: bool| {
        let rates = m
            .attention
            .iter()
            .filter(|t| t.dtype == DType::F32 && t.backward == backward)
            .flat_map(|t| &t.rows)
            .map(|(s, us)| s.flops(backward) as f64 / us / 1e3 / peak(DType::F32));
        middle(rates.collect()).map(|r| r.min(1.0))
    };
    let conv = m.steps.conv.iter().map(|((dtype, shape), t)| {
        rate(*shape, t.us()) / peak(*dtype) / large(*dtype).unwrap_or(0.5)
    });
    let conv = middle(conv.collect()).map(|r| r.min(1.0));
    let mut taken = Taken::default();
    let f32s = taken.of("gemm.f32", large(DType::F32), 0.5);
    let bf16s = taken.of("gemm.bf16", large(DType::Bf16), 0.5);
    let conv = taken.of("conv", conv, 0.5);
    let forward = taken.of("attention", attention(false), 0.3);
    let backward = taken.of("attention_backward", attention(true), 0.3);
    let classes = classes(&m.steps);
    let shares = MEMORY_CLASSES.map(|class| {
        let rates = DTYPES
            .into_iter()
            .filter_map(|d| classes.get(&(class, d)))
            .flatten()
            .map(|(bytes, us)| *bytes as f64 / us / 1e3 / memory_gbps)
            .filter(|r| *r > 0.0);
        taken.positive(class, middle(rates.collect()).unwrap_or(0.0), 0.2)
    });
    SectionText::new("efficiency")
        .text(
            "source",
            taken.source(m.machine.source("medians of the tables below")),
        )
        .set("gemm", by_dtype(&num(f32s), &num(bf16s), None))
        .explained(
            "gemm_tiles",
            "[[8, 8, 1.0]]",
            "A small tile wastes little at the edges of a matmul.",
        )
        .set("conv", num(conv))
        .set("attention", num(forward))
        .set("attention_backward", num(backward))
        .explained(
            "attention_backward_fixed_order",
            "1.0",
            "The device always sums in a fixed order.",
        )
        .write(out);
    memory_shares(shares, out);
}

fn products(out: &mut String, m: &Tables<'_>) {
    let shape = |[a, b, c]: [u64; 3], us: f64| format!("{a}, {b}, {c}, {}", num(us));
    let mut table = |table: &'static str, what: &str, kind: GemmKind, list: Vec<String>| {
        let mut section = SectionText::new(table)
            .text("source", (m.source)(what))
            .text("dtype", kind.dtype);
        if let Some(float8) = kind.float8 {
            section = section
                .text("scaling", float8.scaling.name())
                .set("fast_accum", float8.fast_accum);
        }
        section.set("rows", rows(list)).write(out);
    };
    let gemm = m.steps.gemm.iter().map(|(&(kind, s), t)| (kind, s, t.us()));
    let conv = m.steps.conv.iter();
    let conv = conv.map(|(&(dtype, s), t)| (GemmKind::of(dtype), s, t.us()));
    for (name, measured) in [("gemm", gemm.collect()), ("conv", conv.collect::<Vec<_>>())] {
        for of in measured.chunk_by(|a, b| a.0 == b.0) {
            let list = of.iter().map(|&(_, s, us)| shape(s, us)).collect();
            table(name, "within steps", of[0].0, list);
        }
    }
    for (kind, list) in m.gemm {
        let list = list.iter().map(|(s, us)| shape(*s, *us)).collect();
        table("gemm", "alone, mean over operand layouts", *kind, list);
    }
    let mut grouped = |what: &str, (kind, gradient): GroupedKind, list: Vec<String>| {
        let mut section = SectionText::new("grouped_gemm")
            .text("source", (m.source)(what))
            .text("dtype", kind.dtype);
        if let Some(float8) = kind.float8 {
            section = section.set("fast_accum", float8.fast_accum);
        }
        section = section.set("weight_gradient", gradient.is_some());
        if let Some(result) = gradient {
            section = section.text("result", result);
        }
        section.set("rows", rows(list)).write(out);
    };
    let row = |[e, r, n, k]: GroupedSizes, us: f64| format!("{e}, {r}, {n}, {k}, {}", num(us));
    for (kind, list) in &m.steps.grouped {
        let list = list.iter().map(|(sizes, t)| row(*sizes, t.us())).collect();
        grouped("within steps", *kind, list);
    }
    for table in m.grouped {
        let list = table.rows.iter().map(|(sizes, us)| row(*sizes, *us));
        let what = "alone, mean over layouts of matrices";
        grouped(what, table.kind, list.collect());
    }
}

fn attention(out: &mut String, m: &Tables<'_>) {
    let mut table = |what: &str, dtype: DType, causal: bool, backward: bool, list: Vec<String>| {
        SectionText::new("attention")
            .text("source", (m.source)(what))
            .text("dtype", dtype)
            .set("causal", causal)
            .set("backward", backward)
            .set("rows", rows(list))
            .write(out);
    };
    let row = |s: &AttentionShape, us: f64| {
        let [batch, heads, seq, head_dim] = s.queries();
        let kv_heads = s.kv_heads;
        format!(
            "{batch}, {heads}, {kv_heads}, {seq}, {head_dim}, {}",
            num(us)
        )
    };
    for ((dtype, causal, backward), list) in &m.steps.attention {
        let list = list.iter().map(|(s, t)| row(s, t.us())).collect();
        table("within steps", *dtype, *causal, *backward, list);
    }
    for t in m.attention {
        let list = t.rows.iter().map(|(s, us)| row(s, *us)).collect();
        table("alone", t.dtype, t.causal, t.backward, list);
    }
}

/// Formats a table of memory-bound kernels, for one operation or for a class.
fn memory_table(
    out: &mut String,
    source: &str,
    (class, op, dtype): (&str, Option<&str>, DType),
    rows: &[(u64, f64)],
) {
    let mut table = SectionText::new("memory")
        .text("source", source)
        .text("class", class);
    if let Some(op) = op {
        table = table.text("op", op);
    }
    table
        .text("dtype", dtype)
        .set("in_step", true)
        .text("bytes", "moved")
        .set("rows", by_bytes(rows))
        .write(out);
}

fn memory_classes(out: &mut String, m: &Tables<'_>) {
    let source = (m.source)("within steps");
    for ((class, dtype), rows) in classes(m.steps) {
        memory_table(out, &source, (class, None, dtype), &rows);
    }
}

fn memory(out: &mut String, m: &Tables<'_>) {
    let source = (m.source)("within steps");
    for ((class, op, dtype), rows) in &m.steps.memory {
        let rows: Vec<(u64, f64)> = rows.iter().map(|(b, t)| (*b, t.us())).collect();
        memory_table(out, &source, (class, Some(op), *dtype), &rows);
    }
}

fn collectives(out: &mut String, m: &Tables<'_>) {
    for t in m.collectives {
        let kind = t.kind.name();
        let mut table = SectionText::new("collective")
            .text("source", (m.source)(m.between))
            .text("kind", kind)
            .set("ranks", t.ranks);
        if let Some(dtype) = t.dtype {
            table = table.text("dtype", dtype);
        }
        table = table.set("rows", by_bytes(&t.rows));
        if !t.estimates.is_empty() {
            table = table.set("nccl_rows", by_bytes(&t.estimates));
        }
        table.write(out);
    }
}

#[cfg(test)]
mod tests {
    use super::{Table, Tables, Taken, Totals, collectives, num};
    use shardlab_plan::ir::{CollectiveKind, DType};

    #[test]
    fn estimates_of_a_library_stand_next_to_measurements() {
        let table = |kind, dtype, estimates| Table {
            kind,
            dtype,
            ranks: 2,
            rows: vec![(1024, 5.25), (2048, 6.0)],
            estimates,
        };
        let two = [
            table(
                CollectiveKind::ReduceScatter,
                Some(DType::Bf16),
                vec![(2048, 4.5)],
            ),
            table(CollectiveKind::AllToAll, None, Vec::new()),
        ];
        let mut out = String::new();
        let tables = Tables {
            source: &|what: &str| format!("{what}, by hand"),
            steps: &Totals::default(),
            gemm: &[],
            grouped: &[],
            attention: &[],
            collectives: &two,
            between: "between GPUs",
        };
        collectives(&mut out, &tables);
        let (first, second) = out.trim().split_once("\n\n").unwrap();
        assert_eq!(
            first,
            "[[collective]]\nsource = \"between GPUs, by hand\"\nkind = \"reduce_scatter\"\nranks = 2\ndtype = \"bf16\"\nrows = [[1024, 5.25], [2048, 6.0]]\nnccl_rows = [[2048, 4.5]]"
        );
        assert!(second.ends_with("rows = [[1024, 5.25], [2048, 6.0]]"));
    }

    #[test]
    fn what_was_not_measured_is_named() {
        let mut taken = Taken::default();
        assert_eq!(taken.positive("a", 0.0, 2.0), 2.0);
        assert_eq!(taken.source("runs".to_owned()), "assumed, not measured: a");
        assert_eq!(taken.positive("b", 3.0, 2.0), 3.0);
        assert_eq!(taken.of("c", None, 0.5), 0.5);
        assert_eq!(
            taken.source("runs".to_owned()),
            "runs; assumed, not measured: a, c"
        );
        let mut all = Taken::default();
        all.of("a", Some(0.0), 1.0);
        assert_eq!(all.source("runs".to_owned()), "runs");
    }

    #[test]
    fn numbers_keep_four_digits_and_are_floats() {
        assert_eq!(num(0.0), "0.0");
        assert_eq!(num(0.012_341), "0.01234");
        assert_eq!(num(12.0), "12.0");
        assert_eq!(num(123_456.0), "123456.0");
        assert_eq!(num(3.100), "3.1");
    }
}
