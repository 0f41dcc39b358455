//! Rules for 8-bit optimizer states.

use super::Checked;
use crate::config::{MomentType, Optimizer, Scenario};
use crate::scenario::ScenarioErrorKind;
use crate::scenario::keys::Key;
use crate::scenario::merge::Document;

pub(super) fn check(s: &Scenario, d: &Document) -> Checked {
    if s.precision.moments != MomentType::Block8 {
        return Ok(());
    }
    if s.train.optimizer == Optimizer::Sgd {
        let message = "`moments` has no effect here: sgd has none";
        let error = d.conflict(&[Key::Moments, Key::Optimizer], message);
        return Err(error
            .of(ScenarioErrorKind::NoEffect)
            .with_help("leave it out, or set train.optimizer = \"adamw\""));
    }
    Ok(())
}
