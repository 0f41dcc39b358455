//! Rules for updates of the biases of routers.

use super::{Checked, cannot};
use crate::config::Scenario;
use crate::models;
use crate::scenario::keys::Key;
use crate::scenario::merge::Document;

pub(super) fn check(s: &Scenario, d: &Document) -> Checked {
    if !s.model.has_experts() || s.model.options.experts.router_bias_update_speed == 0.0 {
        return Ok(());
    }
    let refuse = |keys: &[Key], why| cannot(d, Key::RouterBiasUpdateSpeed, keys, why, "0.0");
    let tree = models::declare(s, s.model.layers).tree;
    let mut moved = tree
        .params
        .iter()
        .filter(|p| p.router_bias && p.requires_grad);
    if moved.next().is_none() {
        let why = "moves the biases of routers, and all of them are frozen";
        return Err(refuse(&[Key::Frozen, Key::LoraR], why));
    }
    Ok(())
}
