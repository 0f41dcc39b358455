//! Rules for `fsdp.ignored_params`.

use super::{Checked, cannot};
use crate::config::{IgnoredParams, Scenario};
use crate::ir::{AxisId, DType, Param};
use crate::models;
use crate::recipes;
use crate::scenario::ScenarioError;
use crate::scenario::keys::Key;
use crate::scenario::merge::Document;
use crate::shard::ignored_params;
use crate::shard::placements::shard_axis;

/// Refuses parameters that cannot be left out of FSDP.
pub(super) fn check(s: &Scenario, d: &Document) -> Checked {
    let of = &s.fsdp.ignored_params;
    if of.is_none() {
        return Ok(());
    }
    if *of == IgnoredParams::Experts && s.mesh.ep == 1 {
        let why = "= \"experts\" means those that the ranks of `mesh.ep` divide, but with mesh.ep = 1 \
                   none are divided";
        let error = cannot(d, Key::IgnoredParams, &[Key::Ep], why, "[]");
        return Err(error.with_help("set mesh.ep, or list globs of modules"));
    }
    if s.fsdp.offload.any() {
        let why =
            "leaves parameters on the device, but with `offload` the optimizer runs on the CPU";
        return Err(cannot(d, Key::IgnoredParams, &[Key::Offload], why, "[]"));
    }
    let tree = models::declare(s, s.model.layers).tree;
    let ignored = ignored_params(of, &tree.modules, &tree.params);
    let mut params = tree.params.iter().zip(ignored).filter(|(_, is)| *is);
    params.try_for_each(|(p, _)| {
        copies(s, d, p)?;
        dtype(s, d, p)
    })
}

/// Refuses a trained parameter that other data-parallel ranks have, too: nothing would reduce its
/// gradients over these ranks.
fn copies(s: &Scenario, d: &Document, p: &Param) -> Checked {
    let mesh = s.device_mesh();
    let axis = shard_axis(p.placements);
    let ranks = mesh.size(axis) * mesh.size(AxisId::DP_OUTER);
    if ranks == 1 || !p.requires_grad {
        return Ok(());
    }
    let message = format!(
        "`ignored_params` leaves `{}` out of reductions, but {ranks} data-parallel ranks train copies of it, which \
         would differ after a step",
        p.name
    );
    let help = match axis {
        AxisId::EDP => {
            "let one rank have each expert: set mesh.ep to the size of dp_shard and mesh.dp_replicate to 1"
        }
        _ => "ignore frozen modules only, or experts that no two ranks have in common",
    };
    let keys = [
        Key::IgnoredParams,
        Key::Ep,
        Key::DpShard,
        Key::DpOuter,
        Key::Frozen,
    ];
    Err(d.conflict(&keys, message).with_help(help))
}

/// Refuses a parameter that the model reads in another dtype than its own.
fn dtype(s: &Scenario, d: &Document, p: &Param) -> Checked {
    let types = recipes::of(&s.precision).param_types();
    let (kept, read) = (types.shard(p), types.compute);
    match kept == read {
        true => Ok(()),
        false => Err(other_dtype(d, p, kept, read)),
    }
}

fn other_dtype(d: &Document, p: &Param, kept: DType, read: DType) -> ScenarioError {
    let message = format!(
        "`ignored_params` keeps `{}` in {}, but the model computes in {}: fully_shard casts only the parameters that \
         it manages",
        p.name,
        kept.name(),
        read.name()
    );
    let (keys, help) = match p.requires_grad {
        true => (
            [Key::IgnoredParams, Key::MainParams, Key::Compute],
            "set precision.main_params = \"none\", so that parameters are kept in param_dtype",
        ),
        false => (
            [Key::IgnoredParams, Key::FrozenParams, Key::Compute],
            "set precision.frozen_params to param_dtype",
        ),
    };
    d.conflict(&keys, message).with_help(help)
}
