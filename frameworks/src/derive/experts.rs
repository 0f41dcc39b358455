//! Decides the experts of a model that arguments describe, and how tokens are dispatched to them.

use super::PER_NODE;
use super::architecture::REPLACED;
use crate::draft::Draft;
use crate::error::ConfigError;
use crate::row::{Lack, Row};
use crate::table::{CAPACITY, FORCED, Fact, Format, ROUTING, SHARED_OVERLAP, quoted};
use shardlab_plan::scenario;

const FAMILY: &str = "model.family";
const ROUTER: &str = "model.router";
const BIAS: &str = "model.router_bias";
const SPEED: &str = "model.router_bias_update_speed";
/// Default speed of Megatron-LM and torchtitan.
const RATE: &str = "0.001";
/// Families whose feed-forward layers can be replaced by experts.
const FAMILIES: [&str; 2] = ["llama", "decoder"];

/// Keys of `[model]` that only MoE models have.
const KEYS: [&str; 16] = [
    "model.experts",
    "model.top_k",
    "model.expert_ffn",
    "model.expert_latent",
    "model.shared_expert_ffn",
    "model.shared_expert_gate",
    "model.dense_layers",
    "model.router",
    "model.normalize_top_k",
    "model.router_groups",
    "model.router_group_top_k",
    "model.route_scale",
    BIAS,
    SPEED,
    "model.aux_loss",
    "model.z_loss",
];
const KIND: &str = "model.aux_loss_kind";

/// Turns a model with gated feed-forward layers into an MoE model.
///
/// # Errors
/// Fails if another key gives a different value.
pub(super) fn model(draft: &mut Draft) -> Result<(), ConfigError> {
    make(draft)?;
    if let Some(flavor) = draft.flavor.clone()
        && has_experts(draft)
    {
        balanced(draft, flavor.row)?;
    }
    router_bias(draft);
    Ok(())
}

/// Decides whether steps update the router biases. Megatron-LM does so after each step
/// (`get_updated_expert_bias`), by 0.001 unless `--moe-router-bias-update-rate` is given.
fn router_bias(draft: &mut Draft) {
    if draft.value(BIAS).is_none() {
        let why = "without --moe-router-enable-expert-bias and experts";
        draft.unset(SPEED, Lack::Nothing, why);
    } else if draft.fact(Fact::Adapter).is_some_and(|a| a.value == 1) {
        let why = "updates of router biases next to adapters are not modeled";
        draft.unset(SPEED, Lack::Accuracy, why);
    } else {
        draft.assume(SPEED, RATE, "without --moe-router-bias-update-rate");
    }
}

/// Sets the biases of the routers of torchtitan's flavors, which each step updates
/// (`load_balance_coeff` of `MoEArgs` is 0.001). `row` names the flavor.
///
/// # Errors
/// Fails if another key gives a different value.
fn balanced(draft: &mut Draft, row: usize) -> Result<(), ConfigError> {
    draft.set(row, BIAS, "true".to_owned())?;
    draft.set(row, SPEED, RATE.to_owned())
}

/// Builds the MoE model, without considering updates of biases.
fn make(draft: &mut Draft) -> Result<(), ConfigError> {
    let given = draft.fact(Fact::Experts).filter(|g| g.value > 1);
    let Some(given) = given else {
        for key in KEYS.into_iter().chain([KIND]) {
            draft.unset(key, Lack::Nothing, "part of an option that is off");
        }
        return Ok(());
    };
    if draft.value("model.preset").is_some() {
        draft.none(given.row, Lack::Nothing, REPLACED);
        return Ok(());
    }
    if !FAMILIES
        .iter()
        .any(|f| draft.value(FAMILY) == Some(&quoted(f)))
    {
        let why = "experts without gates are not modeled: add --swiglu";
        draft.none(given.row, Lack::Everything, why);
        return Ok(());
    }
    draft.replace(FAMILY, &quoted("moe"));
    if let Some(before) = draft.fact(Fact::PreSoftmax) {
        if draft.value(ROUTER).is_none() {
            draft.set(before.row, ROUTER, quoted("softmax_topk"))?;
            draft.set(before.row, "model.normalize_top_k", "false".to_owned())?;
        } else {
            draft.none(before.row, Lack::Nothing, "scores are sigmoids");
        }
    }
    draft.set(given.row, "model.experts", given.value.to_string())?;
    draft.assume(
        ROUTER,
        quoted("topk_softmax"),
        "without --moe-router-pre-softmax",
    );
    if draft.fact(Fact::Balancing).is_some_and(|b| b.value == 0) {
        draft.unset(
            "model.aux_loss",
            Lack::Nothing,
            "without a load-balancing loss",
        );
    }
    Ok(())
}

/// Returns whether the model has experts.
pub(super) fn has_experts(draft: &Draft) -> bool {
    let of_preset = |preset: &str| {
        let text = format!(
            "model = {{ preset = {preset} }}\nmesh = {{ hardware = \"cpu\", dp_shard = 1 }}\n"
        );
        let loaded = scenario::parse("model", &text, &[]);
        loaded.is_ok_and(|s| s.model.family.spec().expert_parallel.is_some())
    };
    draft.value(FAMILY) == Some(&quoted("moe"))
        || draft.value("model.preset").is_some_and(of_preset)
}

/// Sets how tokens choose experts, and how they are dispatched under expert parallelism.
///
/// # Errors
/// Fails if another key gives a different value.
pub(super) fn dispatch(draft: &mut Draft, formats: &[&'static Format]) -> Result<(), ConfigError> {
    if draft.value(FORCED).is_some() && !has_experts(draft) {
        let why = "the model has no experts";
        draft.unset(FORCED, Lack::Nothing, why);
        draft.unset(ROUTING, Lack::Nothing, why);
    }
    if draft.fact(Fact::RandomChoices).is_some() {
        draft.unset(ROUTING, Lack::Nothing, "choices are random");
    }
    let number = |draft: &Draft, key| draft.value(key).and_then(|v| v.parse::<u64>().ok());
    let shared = number(draft, "model.shared_expert_ffn").is_some_and(|width| width > 0);
    if draft.value(SHARED_OVERLAP).is_some() && !(shared && draft.value("mesh.ep").is_some()) {
        let why = "no shared expert computes while tokens travel";
        draft.unset(SHARED_OVERLAP, Lack::Nothing, why);
    }
    let Some(ep) = number(draft, "mesh.ep") else {
        draft.unset(CAPACITY, Lack::Accuracy, "no token is predicted as dropped");
        return Ok(());
    };
    let (kind, backend) = (
        draft.fact(Fact::TokenDispatcher),
        draft.fact(Fact::FlexBackend),
    );
    let per_node = number(draft, "mesh.gpus_per_node").unwrap_or(PER_NODE);
    let whole_nodes = number(draft, "mesh.dp_shard").is_some_and(|n| n <= per_node)
        || per_node.is_multiple_of(ep)
        || ep.is_multiple_of(per_node);
    let Some(kind) = kind else {
        undecided(draft, formats, whole_nodes);
        return Ok(());
    };
    let padded = draft.value(CAPACITY).is_some() && draft.fact(Fact::PadToCapacity).is_some();
    let name = match kind.value {
        0 => "gather",
        1 if padded => "padded",
        2 if whole_nodes => "deepep",
        3 if per_node.is_multiple_of(ep) => "peer",
        _ => "all_to_all",
    };
    draft.set(kind.row, DISPATCHER, quoted(name))?;
    if kind.value == 2 && !whole_nodes {
        draft.approximates(kind.row, PARTIAL_NODES);
    } else if kind.value == 3 && name != "peer" {
        draft.rows[kind.row].why = Some(ACROSS_NODES.to_owned());
    }
    // Other arguments that set the same dispatcher.
    let also = match name {
        "padded" => draft.fact(Fact::PadToCapacity),
        _ => backend.filter(|_| kind.value == 2),
    };
    if let Some(also) = also {
        draft.set(also.row, DISPATCHER, quoted(name))?;
        let backend = FLEX_BACKENDS.get(also.value as usize);
        if name == "deepep" && matches!(backend, Some(&("deepepv2" | "ncclep"))) {
            draft.approximates(also.row, LIKE_DEEPEP);
        }
    }
    if name != "padded" {
        draft.unset(CAPACITY, Lack::Accuracy, DROPPED);
    }
    let limits = |row: &Row| row.settings.iter().any(|s| s.key == CAPACITY);
    if let Some(row) = draft.rows.iter().position(limits) {
        draft.approximates(row, PER_EXPERT);
    }
    Ok(())
}

/// Sets the framework's default dispatcher.
fn undecided(draft: &mut Draft, formats: &[&'static Format], whole_nodes: bool) {
    let defaults = formats.iter().flat_map(|f| f.defaults);
    let by_framework = defaults.into_iter().find(|d| d.key == DISPATCHER);
    match by_framework {
        Some(default) if whole_nodes => draft.assume(DISPATCHER, default.value, default.why),
        Some(_) => draft.assume(DISPATCHER, quoted("all_to_all"), PARTIAL_NODES),
        None => {}
    }
    // Only arguments of Megatron-LM give the number of experts.
    if draft.fact(Fact::Experts).is_some() {
        draft.assume(DISPATCHER, quoted("gather"), "Megatron's default");
        draft.unset(CAPACITY, Lack::Accuracy, DROPPED);
    }
}

/// Scenario key of the dispatcher.
pub(super) const DISPATCHER: &str = "moe.dispatcher";
/// Backends of Megatron-LM's `flex` dispatcher. `deepepv2` is that of Megatron-LM #4793.
pub(crate) const FLEX_BACKENDS: [&str; 4] = ["deepep", "hybridep", "deepepv2", "ncclep"];
const LIKE_DEEPEP: &str = "the exchange of this backend is predicted as that of DeepEP";
const ACROSS_NODES: &str =
    "writes to the memory of ranks on other nodes are predicted as an all-to-all of every choice";
const PARTIAL_NODES: &str =
    "groups that do not fill their nodes are predicted as an all-to-all of every choice";
/// Megatron-LM limits the rows of each expert; `moe.capacity_factor` those between two ranks.
const PER_EXPERT: &str = "the limit is predicted for the rows that a rank sends to another one, not for those of each \
                          expert: memory and padded rows are the same, but fewer tokens are dropped if a rank has \
                          several experts that are not equally popular";
const DROPPED: &str = "tokens above the capacity are predicted as kept";
