//! Decides the number of GPUs and the mesh dimensions.

use super::PER_NODE;
use crate::Options;
use crate::convert::{CONTEXT, PIPELINE, TENSOR, ULYSSES};
use crate::draft::{Draft, Given};
use crate::error::ConfigError;
use crate::row::Lack;
use crate::table::{Fact, quoted};

/// Sets the keys of `[mesh]` and returns the number of data-parallel ranks.
pub(super) fn decide(draft: &mut Draft, options: &Options) -> Result<u64, ConfigError> {
    hardware(draft, options)?;
    let world = world(draft, options)?;
    let model_parallel = model_parallel(draft);
    let shard = draft.fact(Fact::DpShard);
    let replicate = draft.fact(Fact::DpReplicate);
    let sizes = shard.map(|s| s.value.saturating_mul(replicate.map_or(1, |r| r.value)));
    let Some(all) = world.or(sizes.map(|n| n.saturating_mul(model_parallel))) else {
        return Err(ConfigError::Missing(
            "the configuration does not say on how many GPUs it runs: add --gpus, such as --gpus 8xh100"
                .to_owned(),
        ));
    };
    if all == 0 || !all.is_multiple_of(model_parallel) {
        let message =
            format!("{all} GPUs are not a multiple of {model_parallel} model-parallel ranks");
        return Err(match model_parallel_row(draft) {
            Some(row) => draft.error(row, message),
            None => ConfigError::Missing(message),
        });
    }
    let ranks = all / model_parallel;
    let (shard_size, replicas) = divide(draft, options, ranks, shard, replicate)?;
    let from_files = draft
        .fact(Fact::Processes)
        .or(draft.fact(Fact::GpusPerNode));
    place(draft, "mesh.dp_shard", shard_size, shard.or(from_files))?;
    if replicas > 1 || replicate.is_some() {
        let row = replicate.or(draft.fact(Fact::Strategy).filter(|s| s.value >= 4));
        place(draft, "mesh.dp_replicate", replicas, row)?;
    }
    expert_parallel(draft, shard_size)?;
    nodes(draft, options, ranks)?;
    if let Some(given) = draft.fact(Fact::Processes)
        && draft.rows[given.row].settings.is_empty()
    {
        draft.rows[given.row]
            .why
            .get_or_insert("agrees with the parallel sizes".to_owned());
    }
    Ok(ranks)
}

/// Sets the expert-parallel size if the model has experts.
fn expert_parallel(draft: &mut Draft, shards: u64) -> Result<(), ConfigError> {
    let Some(given) = draft.fact(Fact::Expert) else {
        return Ok(());
    };
    if given.value <= 1 {
        draft.none(given.row, Lack::Nothing, "off");
    } else if !super::experts::has_experts(draft) {
        draft.none(given.row, Lack::Nothing, "the model has no experts");
    } else if shards.is_multiple_of(given.value) {
        draft.set(given.row, "mesh.ep", given.value.to_string())?;
    } else {
        let why = format!(
            "expert parallelism is modeled within the ranks that shard parameters only, and {shards} are not a \
             multiple of {}: --gpus gives the number of GPUs",
            given.value
        );
        draft.none(given.row, Lack::Everything, why);
    }
    Ok(())
}

/// Sets the number of GPUs per node.
fn nodes(draft: &mut Draft, options: &Options, ranks: u64) -> Result<(), ConfigError> {
    let asked = options.gpus.as_ref();
    let per_node = draft.fact(Fact::GpusPerNode);
    let nodes = draft.fact(Fact::Nodes);
    let by_nodes =
        nodes.filter(|n| n.value > 0 && ranks.is_multiple_of(n.value) && ranks > n.value);
    let (number, row) = match (asked.and_then(|g| g.per_node), per_node, by_nodes) {
        (Some(asked), ..) => (asked, None),
        // `--gpus 8xh100` is one node of eight, whatever the files say.
        (None, Some(_), _) if asked.is_some_and(|g| g.count.is_some()) => (PER_NODE, None),
        (None, Some(given), _) => (given.value, Some(given)),
        (None, None, Some(given)) if asked.is_none_or(|g| g.count.is_none()) => {
            (ranks / given.value, Some(given))
        }
        _ => (PER_NODE, None),
    };
    if let Some(given) = per_node.filter(|g| row.is_none() && g.value != number.min(ranks)) {
        let number = number.min(ranks);
        let why = format!(
            "replaced by --gpus: {number} per node instead of {}",
            given.value
        );
        draft.approximates(given.row, why);
    }
    if row.is_some() || number != PER_NODE {
        place(draft, "mesh.gpus_per_node", number.min(ranks).max(1), row)?;
    }
    if let Some(given) = nodes
        && draft.rows[given.row].settings.is_empty()
    {
        let agrees = per_node.is_some() && asked.is_none_or(|g| g.count.is_none());
        let why = if agrees {
            "times the processes per node"
        } else {
            "the number of GPUs decides"
        };
        draft.rows[given.row].why.get_or_insert(why.to_owned());
    }
    Ok(())
}

/// Sets a mesh size in the row that gives it, or as an option if `--gpus` gives it.
fn place(
    draft: &mut Draft,
    key: &'static str,
    value: u64,
    given: Option<Given<u64>>,
) -> Result<(), ConfigError> {
    match given {
        Some(given) => draft.set(given.row, key, value.to_string()),
        None => {
            draft.option(key, value.to_string(), "--gpus");
            Ok(())
        }
    }
}

fn hardware(draft: &mut Draft, options: &Options) -> Result<(), ConfigError> {
    let Some(gpus) = &options.gpus else {
        return Err(ConfigError::Missing(
            "the configuration does not say on which GPUs it runs: add --gpus, such as --gpus 8xh100 \
             (`shardlab scenarios --hardware` lists the profiles)"
                .to_owned(),
        ));
    };
    let mut name = gpus.hardware.clone();
    if name.ends_with(".toml") {
        let full = std::path::Path::new(&name).canonicalize();
        let full = full.map_err(|e| ConfigError::Missing(format!("--gpus {name}: {e}")))?;
        name = full.display().to_string();
    }
    draft.option("mesh.hardware", quoted(&name), "--gpus");
    Ok(())
}

/// Returns the number of GPUs, if it is known.
fn world(draft: &mut Draft, options: &Options) -> Result<Option<u64>, ConfigError> {
    let nodes = draft.fact(Fact::Nodes);
    let per_node = draft.fact(Fact::GpusPerNode);
    let processes = draft.fact(Fact::Processes).or_else(|| {
        let (nodes, per_node) = (nodes.map_or(1, |n| n.value), per_node?);
        let value = nodes.saturating_mul(per_node.value);
        Some(Given {
            value,
            row: per_node.row,
        })
    });
    let processes = one_process(draft).or(processes);
    let asked = options.gpus.as_ref().and_then(|g| g.count);
    if let (Some(asked), Some(given)) = (asked, processes)
        && asked != given.value
    {
        draft.approximates(
            given.row,
            format!("replaced by --gpus: {asked} instead of {}", given.value),
        );
    }
    if let Some(zero) = processes.filter(|p| p.value == 0) {
        return Err(draft.error(zero.row, "expected at least 1 process".to_owned()));
    }
    Ok(asked.or(processes.map(|p| p.value)))
}

/// Returns one process for a job that Accelerate does not distribute (`distributed_type: NO`).
/// Accelerate then starts one process, whatever the given number of processes.
fn one_process(draft: &mut Draft) -> Option<Given<u64>> {
    let given = draft.fact(Fact::OneProcess)?;
    if let Some(processes) = draft.fact(Fact::Processes).filter(|p| p.value > 1) {
        let why = "one process is started without distribution";
        draft.none(processes.row, Lack::Nothing, why);
    }
    Some(given)
}

/// Returns the product of the tensor, pipeline and context parallel sizes, and marks the kinds of
/// parallelism that are not modeled.
fn model_parallel(draft: &mut Draft) -> u64 {
    let axes = [
        (Fact::Tensor, TENSOR),
        (Fact::Pipeline, PIPELINE),
        (Fact::Context, CONTEXT),
        (Fact::Ulysses, ULYSSES),
    ];
    let mut product: u64 = 1;
    for (fact, why) in axes {
        let Some(given) = draft.fact(fact) else {
            continue;
        };
        if given.value > 1 {
            draft.none(given.row, Lack::Everything, why);
            product = product.saturating_mul(given.value);
        } else {
            draft.none(given.row, Lack::Nothing, "off");
        }
    }
    product
}

fn model_parallel_row(draft: &Draft) -> Option<usize> {
    let axes = [Fact::Tensor, Fact::Pipeline, Fact::Context, Fact::Ulysses];
    let facts = axes.iter().filter_map(|f| draft.fact(*f));
    facts.filter(|f| f.value > 1).map(|f| f.row).next()
}

/// Divides data-parallel ranks into shards and replicas.
fn divide(
    draft: &Draft,
    options: &Options,
    ranks: u64,
    shard: Option<Given<u64>>,
    replicate: Option<Given<u64>>,
) -> Result<(u64, u64), ConfigError> {
    let refuse = |row: usize, sizes: String| {
        let message = format!("{sizes}, but the job has {ranks} data-parallel ranks");
        Err(draft.error(row, message))
    };
    match (shard, replicate) {
        (Some(s), Some(r)) if s.value.saturating_mul(r.value) != ranks => refuse(
            s.row,
            format!("{} shards times {} replicas", s.value, r.value),
        ),
        (Some(s), Some(r)) => Ok((s.value, r.value)),
        (Some(s), None) if s.value == 0 || !ranks.is_multiple_of(s.value) => {
            refuse(s.row, format!("{} shards", s.value))
        }
        (Some(s), None) => Ok((s.value, ranks / s.value)),
        (None, Some(r)) if r.value == 0 || !ranks.is_multiple_of(r.value) => {
            refuse(r.row, format!("{} replicas", r.value))
        }
        (None, Some(r)) => Ok((ranks / r.value, r.value)),
        (None, None) => {
            let hybrid = draft.fact(Fact::Strategy).is_some_and(|s| s.value >= 4);
            let nodes = draft.fact(Fact::Nodes).map(|n| n.value).filter(|n| *n > 1);
            let asked = options.gpus.as_ref();
            let counted = asked.is_some_and(|g| g.count.is_some());
            let of_files = draft.fact(Fact::GpusPerNode).map(|g| g.value);
            let per_node = asked
                .and_then(|g| g.per_node)
                .or(of_files.map(|n| if counted { PER_NODE } else { n }))
                .or(nodes.map(|n| ranks / n))
                .unwrap_or(PER_NODE);
            if hybrid && per_node > 0 && per_node < ranks && ranks.is_multiple_of(per_node) {
                Ok((per_node, ranks / per_node))
            } else {
                Ok((ranks, 1))
            }
        }
    }
}
