//! The part of a prediction that the dashboard shows. It is small and does not depend on the
//! program.

use super::options;
use super::query::Fields;
use crate::analysis::why;
use crate::predict::Prediction;
use shardlab_plan::ir::Role;
use shardlab_plan::record::{Basis, Cause};
use shardlab_plan::scenario::BatchUnit;
use shardlab_plan::units::Bytes;
use shardlab_reports::view::ExpertsView;
use std::sync::Arc;

/// The numbers of a prediction.
#[derive(Clone, Debug, PartialEq)]
pub struct Brief {
    /// Step time, milliseconds.
    pub step_ms: f64,
    /// Tokens (or the model's batch unit) per second and GPU.
    pub tokens_per_s: f64,
    /// Unit of the batches.
    pub counted_in: BatchUnit,
    /// Model FLOPs utilisation, 0 to 1.
    pub mfu: f64,
    /// Exposed time, milliseconds.
    pub exposed_ms: f64,
    /// Host time of a step, milliseconds.
    pub host_ms: f64,
    /// Peak of allocated memory.
    pub allocated: Bytes,
    /// Peak of reserved memory.
    pub reserved: Bytes,
    /// Peak of device memory.
    pub device: Bytes,
    /// Capacity of the device, if known.
    pub capacity: Option<Bytes>,
    /// `yes`, `tight`, `no` or `?`.
    pub fits: &'static str,
    /// Policy.
    pub policy: String,
    /// Number of ranks.
    pub world: u32,
    /// Hardware profile.
    pub hardware: String,
    /// The basis of the prediction.
    pub basis: Option<Arc<Basis>>,
}

impl Brief {
    /// Returns the numbers of a prediction.
    #[must_use]
    pub fn of(p: &Prediction) -> Self {
        let memory = &p.run.memory;
        Self {
            step_ms: p.step_ms(),
            tokens_per_s: p.tokens_per_s(),
            counted_in: p.scenario.model.family.counted_in(),
            mfu: p.run.mfu,
            exposed_ms: p.run.exposed_total().ms(),
            host_ms: p.run.host.ms(),
            allocated: memory.peak_allocated,
            reserved: memory.peak_reserved,
            device: memory.peak_device,
            capacity: memory.capacity,
            fits: p.fit.word(),
            policy: p.run.policy.clone(),
            world: p.run.world_size,
            hardware: p.run.hardware.clone(),
            basis: p.run.basis.clone().map(Arc::new),
        }
    }

    /// Returns a field for filtering and sorting, as text.
    #[must_use]
    pub fn field(&self, name: &str) -> Option<String> {
        Some(match name {
            "step" => self.step_ms.to_string(),
            "tokens" => self.tokens_per_s.to_string(),
            "mfu" => (100.0 * self.mfu).to_string(),
            "exposed" => self.exposed_ms.to_string(),
            "host" => self.host_ms.to_string(),
            "alloc" => self.allocated.gib().to_string(),
            "resv" => self.reserved.gib().to_string(),
            "device" => self.device.gib().to_string(),
            "fits" => self.fits.to_owned(),
            "policy" => self.policy.clone(),
            "world" => self.world.to_string(),
            "hardware" => self.hardware.clone(),
            "basis" => self.basis.as_ref()?.kind.word().to_owned(),
            _ => return None,
        })
    }
}

/// Names of the fields of a [`Brief`], for help and messages.
pub const FIELDS: [&str; 13] = [
    "step", "tokens", "mfu", "exposed", "host", "alloc", "resv", "device", "fits", "policy",
    "world", "hardware", "basis",
];

/// A prediction, and the options it was made with.
#[derive(Clone, Debug, PartialEq)]
pub struct Glance {
    /// Numbers.
    pub brief: Brief,
    /// Exposed time by cause, milliseconds, largest first.
    pub exposed: Vec<(Cause, f64)>,
    /// Bytes allocated at the peak by role, largest first.
    pub roles: Vec<(Role, Bytes)>,
    /// Where memory peaks, in words.
    pub peak: String,
    /// Lines on experts; empty without experts.
    pub experts: Vec<String>,
    /// Explanation, one sentence each.
    pub why: Vec<String>,
    /// Values of all options, in the order of [`options::all`].
    pub values: Vec<Option<String>>,
    /// Digest of the program.
    pub digest: String,
}

impl Glance {
    /// Summarises a prediction made with its spans.
    #[must_use]
    pub fn of(p: &Prediction) -> Self {
        let mut exposed: Vec<(Cause, f64)> =
            p.run.exposed.iter().map(|(c, t)| (*c, t.ms())).collect();
        exposed.sort_by(|a, b| b.1.total_cmp(&a.1));
        let at = &p.run.memory.at;
        let unit = &p.program.units[at.unit.index()].name;
        Self {
            brief: Brief::of(p),
            exposed,
            roles: p.run.memory.by_role.clone(),
            peak: format!("{} of {unit}", at.phase.name()),
            experts: ExpertsView::new(&p.run, &p.program, &p.scenario)
                .map_or_else(Vec::new, |e| e.lines().into()),
            why: why::sentences(p),
            values: options::values(&p.scenario),
            digest: p.run.program_digest.clone(),
        }
    }
}

/// An item of a list with its prediction, for filters.
pub struct Named<'a> {
    /// Searchable text.
    pub text: String,
    /// Numbers, if known.
    pub brief: Option<&'a Brief>,
    /// Additional fields.
    pub more: &'a dyn Fn(&str) -> Option<String>,
}

impl Fields for Named<'_> {
    fn text(&self) -> String {
        self.text.clone()
    }

    fn field(&self, name: &str) -> Option<String> {
        (self.more)(name).or_else(|| self.brief?.field(name))
    }
}
