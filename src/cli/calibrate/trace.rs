//! A profile with costs from traces of the user's jobs.

use super::Onto;
use super::host::with_host_scale;
use crate::cli::import::failure;
use crate::cli::output::{Failure, say};
use shardlab_import::RunImport;
use shardlab_import::costs::{Costs, Times};
use shardlab_import::infer::hardware;
use shardlab_import::kineto::Recorder;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Returns the text of a profile: tables from the traces, followed by those of the base profile.
/// `base` is the name of the base profile; the default is that of the device.
pub(super) fn profile(
    files: &[PathBuf],
    base: Option<&str>,
    name: Option<&str>,
) -> Result<String, Failure> {
    let files = shardlab_import::source::expand(files).map_err(failure)?;
    // Ranks of one job show how long their collectives take without waits. All costs describe one
    // machine.
    let jobs = shardlab_import::jobs(&files).map_err(failure)?;
    let mut runs = Vec::new();
    for job in &jobs {
        let import = shardlab_import::import(job, "trace").map_err(failure)?;
        let Some(run) = import.run else {
            return Err(Failure::bad_input(format_args!(
                "{}: a trace of the PyTorch profiler is expected",
                job[0].display()
            )));
        };
        runs.push((job[0].as_path(), run));
    }
    let device = one_device(&runs)?;
    for (path, run) in &runs {
        waits(path, run);
    }
    let base = match base.or_else(|| hardware(&device)) {
        Some(base) => base.to_owned(),
        None => {
            return Err(Failure::bad_input(format_args!(
                "no profile of {device} is shipped: name the closest one with --base-profile"
            )));
        }
    };
    let mut onto = Onto::load_any(&base, name)?;
    let rate = onto.profile.device.loaded_rate;
    let mut tables = String::new();
    for (path, run) in &runs {
        let about = format!("trace {} of {device}", shown(path));
        write(&mut tables, &run.costs, &about, rate, run.ranks.len() > 1);
    }
    let unsized_collectives: u64 = runs.iter().map(|r| r.1.costs.unsized_collectives).sum();
    if unsized_collectives > 0 {
        say(format_args!(
            "note: {unsized_collectives} collectives are left out, because the sizes of their tensors or groups are not in the traces"
        ));
    }
    if tables.is_empty() {
        let nsight = runs.iter().all(|r| r.1.facts.recorder == Recorder::Nsight);
        return Err(Failure::bad_input(match nsight {
            true => {
                "the exports show no costs: Nsight Systems records neither shapes nor sizes of collectives; a trace of the PyTorch profiler does, with record_shapes=True"
            }
            false => "the traces show no costs: shapes are recorded with record_shapes=True",
        }));
    }
    match slowest_host(&runs, onto.profile.host.launch_us) {
        Some((path, factor)) => {
            let about = format!(
                "trace {} of {device}: kernel launches, relative to those of {base}",
                shown(&path)
            );
            onto.text = with_host_scale(&onto.text, factor, &about);
            say(format_args!(
                "note: the host takes {factor:.2} times as long as that of {base}, by its kernel launches under the profiler"
            ));
        }
        None => say(format_args!(
            "note: the traces have too few kernel launches to show how fast the host is; the profile keeps that of {base}"
        )),
    }
    let unknown: u64 = runs.iter().map(|(_, run)| run.costs.without_shapes).sum();
    if unknown > 0 {
        say(format_args!(
            "note: {unknown} matmuls and attention operators have no shapes, or shapes that tables cannot hold"
        ));
    }
    Ok(onto.with(tables.trim_end()))
}

/// Warns that the times of collectives contain waits for ranks whose traces are not given.
fn waits(path: &Path, run: &RunImport) {
    let given = run.ranks.len();
    let world = run
        .facts
        .world_size
        .as_ref()
        .map_or(1, |w| w.value as usize);
    if given < world && !run.costs.collectives.is_empty() {
        say(format_args!(
            "warning: {}: {given} of {world} ranks of this job {}, so the times of collectives contain waits for the others; give the traces of all ranks",
            path.display(),
            if given == 1 { "is given" } else { "are given" }
        ));
    }
}

/// Returns the trace with the slowest host, which the other ranks wait for, and its slowdown.
fn slowest_host(runs: &[(&Path, RunImport)], launch_us: f64) -> Option<(PathBuf, f64)> {
    let ranks = runs
        .iter()
        .flat_map(|(_, run)| run.ranks.iter().zip(&run.launches));
    let factors =
        ranks.filter_map(|(rank, times)| Some((&rank.file, times.host_factor(launch_us)?)));
    let slowest = factors.max_by(|a, b| a.1.total_cmp(&b.1));
    slowest.map(|(file, factor)| (PathBuf::from(file), factor))
}

fn shown(path: &Path) -> String {
    path.file_name()
        .map_or_else(String::new, |n| n.to_string_lossy().replace('"', ""))
}

fn one_device(runs: &[(&Path, RunImport)]) -> Result<String, Failure> {
    let device = |run: &RunImport| run.measured.run.hardware.clone();
    let first = device(&runs[0].1);
    match runs.iter().find(|(_, run)| device(run) != first) {
        None => Ok(first),
        Some((path, run)) => Err(Failure::bad_input(format_args!(
            "{}: recorded on {}, the first trace on {first}; a profile describes one device",
            path.display(),
            device(run)
        ))),
    }
}

/// Writes the tables of one trace. Their kernels were measured within steps. A profile whose tables
/// are those of an idle device slows all kernels down by `rate`, so this factor is removed from the
/// stored times. `several` says whether traces of several ranks are given, which show the waits of
/// collectives.
fn write(out: &mut String, costs: &Costs, about: &str, rate: f64, several: bool) {
    let kernel = |t: &Times| number(t.median_us() * rate);
    let idle = match rate < 1.0 {
        true => format!(", times {rate} (loaded_rate, which predictions divide by)"),
        false => String::new(),
    };
    let mut table = |head: &str, keys: &[String], rows: Vec<String>, how: &str| {
        if rows.is_empty() {
            return;
        }
        // Writing to a string cannot fail.
        let _ = writeln!(out, "[[{head}]]\nsource = \"{about}: {how}\"");
        for key in keys {
            let _ = writeln!(out, "{key}");
        }
        let _ = writeln!(out, "rows = [{}]\n", rows.join(", "));
    };
    let quoted = |key: &str, value: &str| format!("{key} = \"{value}\"");
    let dtypes: Vec<&str> = ["bf16", "f16", "f32"].to_vec();
    let how = |n: usize| format!("medians of {n} matmuls within steps{idle}");
    for dtype in &dtypes {
        let of = costs.gemm.iter().filter(|(k, _)| k.0 == *dtype);
        let n = of.clone().map(|(_, t)| t.count()).sum();
        let rows = of.map(|((_, [m, n, k]), t)| format!("[{m}, {n}, {k}, {}]", kernel(t)));
        table("gemm", &[quoted("dtype", dtype)], rows.collect(), &how(n));
    }
    for dtype in &dtypes {
        for (causal, backward) in [(true, false), (true, true), (false, false), (false, true)] {
            let of = costs
                .attention
                .iter()
                .filter(|(k, _)| k.dtype == *dtype && k.causal == causal && k.backward == backward);
            let rows = of.map(|(k, t)| {
                let [b, h, kv, s, d] = k.shape;
                format!("[{b}, {h}, {kv}, {s}, {d}, {}]", kernel(t))
            });
            let keys = [
                quoted("dtype", dtype),
                format!("causal = {causal}"),
                format!("backward = {backward}"),
            ];
            let how = format!("medians of attention within steps{idle}");
            table("attention", &keys, rows.collect(), &how);
        }
    }
    let mut classes: Vec<(&str, &str)> = costs.memory.keys().map(|k| (k.0, k.1)).collect();
    classes.dedup();
    for (class, dtype) in classes {
        let of = costs
            .memory
            .iter()
            .filter(|(k, _)| (k.0, k.1) == (class, dtype));
        let rows = of.map(|((_, _, bytes), t)| format!("[{bytes}, {}]", number(t.median_us())));
        let keys = [
            quoted("class", class),
            quoted("dtype", dtype),
            "in_step = true".to_owned(),
            "bytes = \"moved\"".to_owned(),
        ];
        let how = "medians within steps; bytes follow from shapes";
        table("memory", &keys, rows.collect(), how);
    }
    let mut kinds: Vec<(&str, u32)> = costs.collectives.keys().map(|k| (k.0, k.1)).collect();
    kinds.dedup();
    for (kind, ranks) in kinds {
        let of = costs
            .collectives
            .iter()
            .filter(|(k, _)| (k.0, k.1) == (kind, ranks));
        // Waits for other ranks only make collectives longer.
        let rows = of.map(|((_, _, bytes), t)| format!("[{bytes}, {}]", number(t.fastest_us())));
        let keys = [quoted("kind", kind), format!("ranks = {ranks}")];
        let how = match several {
            true => "fastest call of one step without waits for other ranks, next to computation",
            false => "fastest call of one step, next to computation",
        };
        table("collective", &keys, rows.collect(), how);
    }
}

/// Rounds to four significant digits, as TOML.
fn number(us: f64) -> String {
    let digits = 3 - us.abs().max(1e-9).log10().floor() as i32;
    format!("{us:.*}", digits.clamp(1, 6) as usize)
}
