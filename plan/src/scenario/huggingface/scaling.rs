//! Scaling of rotary frequencies.

use super::super::error::ScenarioError;
use super::super::keys::Key;
use super::super::merge::Document;
use super::super::value::Value;
use super::json::datum;
use super::{Config, Kind};
use crate::models::{ROPE_SCALING_PLACES, rope_scaling};

impl Config<'_> {
    /// Returns the key of the scaling.
    pub(super) fn scaling(
        &self,
        d: &Document,
        kind: Kind,
    ) -> Result<Option<(Key, Value)>, ScenarioError> {
        let found = self.first(&ROPE_SCALING_PLACES);
        let origin = found.map_or(self.whole(), |v| v.origin);
        let scaling = rope_scaling(&|name| self.json(name));
        let Some(scaling) = scaling.map_err(|what| d.error(origin, what))? else {
            return Ok(None);
        };
        if !kind.family.has("rope_scaling") {
            let what = format!("family {} has no `rope_scaling`", kind.family.name);
            return Err(d.error(origin, what));
        }
        let datum = datum(scaling, origin);
        Ok(Some((Key::RopeScaling, Value { datum, origin })))
    }
}
