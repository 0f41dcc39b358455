//! `shardlab` without a command: the GPUs of this machine, and what fits on them.

use super::args::profiles;
use super::output::{Failure, Out, Status};
use super::table::Table;
use crate::analysis::what_fits::{Answer, MORE, TOKENS, Training, what_fits};
use serde_json::{Value, json};
use shardlab_frameworks::Gpus;
use shardlab_import::infer::hardware;
use shardlab_plan::record::basis::number;
use shardlab_plan::units::{Bytes, count, short_count};

/// Minimum memory of a GPU as a share of a profile's memory, for the profile to describe it. A
/// slice of a GPU (MIG) has less.
const SAME: f64 = 0.97;

#[derive(clap::Args)]
pub(super) struct Args {
    /// Without a command: show what fits on these GPUs instead of this machine's, such as 8xh100,
    /// 4x8xh200 (nodes first) or a100-40
    #[arg(long, value_name = "GPUS")]
    gpus: Option<Gpus>,
    /// Without a command: print one JSON object
    #[arg(long)]
    json: bool,
}

/// A group of equal GPUs in this machine.
#[derive(Clone, Debug, PartialEq)]
struct Group {
    name: String,
    memory: Bytes,
    count: u64,
    /// Shipped hardware profile.
    profile: Option<&'static str>,
}

/// Returns the names and memory of this machine's GPUs, or the reason why there are none.
#[cfg(feature = "cuda")]
fn detect() -> Result<Vec<(String, Bytes)>, String> {
    use shardlab_exec::device::cuda::visible_gpus;
    let gpus = visible_gpus(&[]).map_err(|e| e.to_string())?;
    Ok(gpus.into_iter().map(|g| (g.name, g.memory)).collect())
}

#[cfg(not(feature = "cuda"))]
fn detect() -> Result<Vec<(String, Bytes)>, String> {
    Err("this binary was built without feature `cuda`, and does not look for any".to_owned())
}

/// Groups equal GPUs, in the order of the first of each.
fn grouped(gpus: impl IntoIterator<Item = (String, Bytes)>) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for (name, memory) in gpus {
        let same = |g: &&mut Group| g.name == name && g.memory == memory;
        match groups.iter_mut().find(same) {
            Some(group) => group.count += 1,
            None => groups.push(Group {
                profile: profile(&name, memory),
                name,
                memory,
                count: 1,
            }),
        }
    }
    groups
}

/// Returns the shipped profile of a GPU, if there is one and the GPU has as much memory.
fn profile(name: &str, memory: Bytes) -> Option<&'static str> {
    let profile = hardware(name)?;
    let described = shardlab_sim::hardware::load(profile)
        .ok()?
        .device
        .memory_mib;
    let least = SAME * described as f64 * f64::from(1 << 20);
    (memory.0 as f64 >= least).then_some(profile)
}

pub(super) fn run(args: &Args, out: &mut Out) -> Result<Status, Failure> {
    let seen = match &args.gpus {
        Some(_) => Ok(Vec::new()),
        None => detect().map(grouped),
    };
    let groups = seen.as_deref().unwrap_or_default();
    let known = groups.iter().filter(|g| g.profile.is_some());
    let largest = known.max_by_key(|g| g.count);
    let own = largest.and_then(|g| format!("{}x{}", g.count, g.profile?).parse().ok());
    let gpus: Option<Gpus> = args.gpus.clone().or(own);
    let fits = gpus.as_ref().map(trainings).transpose()?;
    let fits = fits.unwrap_or_default();
    if args.json {
        out.json(&json!({
            "format": 1,
            "gpus": groups.iter().map(|g| json!({
                "name": g.name,
                "count": g.count,
                "memory_bytes": g.memory.0,
                "hardware": g.profile,
            })).collect::<Vec<_>>(),
            "why_none": seen.as_ref().err(),
            "hardware": gpus.as_ref().map(|g| &g.hardware),
            "count": gpus.as_ref().map(number_of),
            "tokens_per_gpu": TOKENS,
            "trainings": fits.iter().map(object).collect::<Vec<_>>(),
        }))?;
        return Ok(Status::Done);
    }
    if args.gpus.is_none() {
        found(&seen, out)?;
    }
    match &gpus {
        Some(gpus) => {
            table(gpus, &fits, out)?;
            next(gpus, out)?;
        }
        None => {
            out.labelled("next", "`shardlab --gpus 8xh100` shows what fits on eight H100; other names are h200, a100, a100-40, b200, or the path of a hardware profile")?;
            out.labelled("", &fit("8xh100"))?;
            out.labelled("", "`shardlab --help` lists all commands")?;
        }
    }
    Ok(Status::Done)
}

/// Prints the GPUs of this machine.
fn found(seen: &Result<Vec<Group>, String>, out: &mut Out) -> Result<(), Failure> {
    let groups = match seen {
        Ok(groups) => groups,
        Err(why) => {
            out.labelled("GPUs", &format!("none: {why}"))?;
            return Ok(());
        }
    };
    for (i, group) in groups.iter().enumerate() {
        let profile = match group.profile {
            Some(profile) => format!("hardware profile {profile}"),
            None => "no profile is shipped: `shardlab calibrate --device cuda --out gpu.toml` measures one, and `shardlab --gpus gpu.toml` uses it".to_owned(),
        };
        out.labelled(
            if i == 0 { "GPUs" } else { "" },
            &format!(
                "{} x {}, {} each; {profile}",
                group.count, group.name, group.memory
            ),
        )?;
    }
    Ok(())
}

/// Returns the number of GPUs. A name alone stands for one.
fn number_of(gpus: &Gpus) -> u64 {
    gpus.count.unwrap_or(1)
}

fn trainings(gpus: &Gpus) -> Result<Vec<Training>, Failure> {
    let all = number_of(gpus);
    let mut mesh = vec![
        format!("mesh.hardware={}", gpus.hardware),
        format!("mesh.dp_shard={all}"),
    ];
    mesh.extend(gpus.per_node.map(|n| format!("mesh.gpus_per_node={n}")));
    Ok(what_fits(all, &mesh, &profiles())?)
}

fn table(gpus: &Gpus, all: &[Training], out: &mut Out) -> Result<(), Failure> {
    out.heading(format_args!(
        "What fits on {} x {}: {} tokens per GPU at a time, PyTorch fully_shard, AdamW, bfloat16",
        number_of(gpus),
        gpus.hardware,
        count(TOKENS)
    ))?;
    let mut table = Table::new([
        "model",
        "?>parameters",
        "training",
        "fits",
        "settings",
        ">reserved GiB",
        ">tokens/s/GPU",
    ]);
    for t in all {
        let (fits, with, gib, rate) = match &t.answer {
            Answer::Fits {
                with,
                effect,
                basis,
                ..
            } => (
                "yes",
                (*with).to_owned(),
                effect.peak_reserved.gib(),
                number(effect.tokens_per_s, 0, basis.as_ref()),
            ),
            Answer::No {
                needed,
                gpus: needs,
            } => (
                "no",
                needs.map_or_else(
                    || format!("needs more than {} GPUs", count(MORE * number_of(gpus))),
                    |n| format!("needs {} GPUs", count(n)),
                ),
                needed.gib(),
                String::new(),
            ),
        };
        table.row([
            t.model.to_owned(),
            short_count(t.parameters),
            if t.lora { "LoRA" } else { "full" }.to_owned(),
            fits.to_owned(),
            with,
            format!("{gib:.1}"),
            rate,
        ]);
    }
    out.text(table)?;
    Ok(())
}

/// Returns the command that shows whether a job fits.
fn fit(gpus: &str) -> String {
    format!(
        "`shardlab fit JOB --gpus {gpus}` predicts whether your job fits: a configuration of Accelerate, the Trainer, torchtitan and others, or a config.json"
    )
}

fn next(gpus: &Gpus, out: &mut Out) -> Result<(), Failure> {
    let name = gpus.spec();
    out.blank()?;
    out.labelled("next", &fit(&name))?;
    out.labelled(
        "",
        &format!("`shardlab tune JOB --gpus {name}` finds its best settings"),
    )?;
    out.labelled("", "`shardlab --help` lists all commands")?;
    Ok(())
}

fn object(t: &Training) -> Value {
    let mut object = json!({
        "model": t.model,
        "parameters": t.parameters,
        "training": if t.lora { "lora" } else { "full" },
    });
    let more = match &t.answer {
        Answer::Fits { set, effect, .. } => json!({
            "fits": true,
            "set": set,
            "step_ms": effect.step_ms,
            "tokens_per_s_per_gpu": effect.tokens_per_s,
            "peak_reserved_bytes": effect.peak_reserved.0,
            "peak_device_bytes": effect.peak_device.0,
        }),
        Answer::No { needed, gpus } => json!({
            "fits": false,
            "peak_device_bytes": needed.0,
            "fits_on_gpus": gpus,
        }),
    };
    if let (Value::Object(object), Value::Object(more)) = (&mut object, more) {
        object.extend(more);
    }
    object
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_gpus_are_one_group_with_their_profile() {
        let mib = |n: u64| Bytes(n << 20);
        let h100 = || ("NVIDIA H100 80GB HBM3".to_owned(), mib(81_079));
        let gpus = [
            h100(),
            h100(),
            ("NVIDIA H100 80GB HBM3 MIG 1g.10gb".to_owned(), mib(9_728)),
            ("NVIDIA L40S".to_owned(), mib(45_458)),
            h100(),
        ];
        let groups = grouped(gpus);
        let short: Vec<_> = groups.iter().map(|g| (g.count, g.profile)).collect();
        assert_eq!(short, [(3, Some("h100-80")), (1, None), (1, None)]);
        for (name, gib, expected) in [
            ("NVIDIA H200", 139, "h200-nvlink"),
            ("NVIDIA A100-SXM4-40GB", 39, "a100-40"),
            ("NVIDIA A100-SXM4-80GB", 79, "a100-80"),
            ("NVIDIA B200", 178, "b200"),
        ] {
            assert_eq!(profile(name, Bytes(gib << 30)), Some(expected), "{name}");
        }
    }
}
