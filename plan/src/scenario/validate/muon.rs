//! Rules for Muon.

use super::{Checked, cannot};
use crate::config::{MomentType, Optimizer, Scenario};
use crate::lower::MuonMatrices;
use crate::lower::optimizer::muon_params;
use crate::models;
use crate::policies;
use crate::scenario::keys::Key;
use crate::scenario::merge::Document;

pub(super) fn check(s: &Scenario, d: &Document) -> Checked {
    if s.train.optimizer != Optimizer::Muon {
        return Ok(());
    }
    let (key, refuse) = (Key::Optimizer, "\"adamw\"");
    let matrices = policies::lowering(s).muon;
    if let MuonMatrices::Refused(why) = matrices {
        let error = cannot(d, key, &[Key::Policy, Key::Mode], why, refuse);
        let help = "set fsdp.policy = \"native\", which gives each rank whole matrices, or \"fsdp2\", which gathers them, and compile.mode other than \"full\"";
        return Err(error.with_help(help));
    }
    if matrices == MuonMatrices::Gathered && s.fsdp.offload.any() {
        let why = "muon gathers the rows of matrices on the GPU under fsdp2, but `offload` keeps \
                   them in host memory";
        let error = cannot(d, key, &[Key::Offload, Key::Policy], why, refuse);
        return Err(error.with_help("set fsdp.offload = [], or fsdp.policy = \"native\""));
    }
    if s.mesh.tp > 1 {
        let why = "muon does not support tensor parallelism: ranks have parts of matrices";
        return Err(cannot(d, key, &[Key::Tp], why, refuse));
    }
    if s.precision.moments == MomentType::Block8 {
        let why = "muon keeps its momentum in the type of `moments`, and has no 8-bit momentum";
        return Err(cannot(d, key, &[Key::Moments], why, refuse));
    }
    if s.train.muon_momentum >= 1.0 {
        return Err(d.conflict(&[Key::MuonMomentum], "muon_momentum must be below 1"));
    }
    let tree = models::declare(s, s.model.layers).tree;
    if muon_params(s, &tree).contains(&true) {
        return Ok(());
    }
    let why = "muon updates matrices of blocks, and the model trains none";
    Err(cannot(d, key, &[], why, refuse))
}
