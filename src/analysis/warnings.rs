//! Warnings about a prediction: what it cannot price, and what makes a job needlessly slow.

use super::misaligned::{Misaligned, aligned_mesh};
use super::shapes;
use crate::predict::Prediction;
use serde::Serialize;

/// Share of the step from which on time lost to misaligned collectives is worth a warning.
const WORTH_SAYING: f64 = 0.005;

/// What a warning is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A dimension of matmuls that is off the fast path of the libraries.
    UnalignedShape,
    /// Collectives whose payload per rank is not aligned.
    MisalignedCollectives,
}

/// A warning.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Warning {
    /// What it is about.
    pub kind: Kind,
    /// The warning, in a sentence.
    pub message: String,
    /// Overrides that remove its cause, where some do.
    pub set: Vec<String>,
}

/// Returns the warnings about a prediction.
#[must_use]
pub fn of(p: &Prediction) -> Vec<Warning> {
    let mut all: Vec<Warning> = shapes::unaligned(p)
        .into_iter()
        .map(|dimension| Warning {
            kind: Kind::UnalignedShape,
            message: dimension.sentence(),
            set: dimension.padding().into_iter().collect(),
        })
        .collect();
    all.extend(misaligned(p));
    all
}

fn misaligned(p: &Prediction) -> Option<Warning> {
    let found = Misaligned::of(p);
    let step = p.run.recorded_to.saturating_sub(p.run.recorded_from);
    if step.0 == 0 || (found.lost.0 as f64) < WORTH_SAYING * step.0 as f64 {
        return None;
    }
    let mesh = aligned_mesh(p);
    Some(Warning {
        kind: Kind::MisalignedCollectives,
        message: found.sentence(mesh),
        set: mesh.map_or_else(Vec::new, |mesh| mesh.overrides()),
    })
}
