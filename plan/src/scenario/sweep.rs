//! Sweeps: the product of axes over any keys.

use super::error::ScenarioError;
use super::keys::Key;
use super::merge::{Document, Layer};
use super::value::Value;
use super::{load, read};
use crate::config::Scenario;
use std::path::Path;

/// One axis of a sweep.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Axis {
    /// Paths of the keys that it sets together, for example `fsdp.prefetch_forward` alone, or
    /// `mesh.dp_shard` and `mesh.dp_replicate`.
    pub keys: Vec<String>,
    /// Values, each with one for every key, as written: strings without quotes; paths of files as
    /// the working directory has them.
    pub values: Vec<Vec<String>>,
}

/// One point of a sweep.
#[derive(Clone, Debug, PartialEq)]
pub struct SweepPoint {
    /// Path and value of every key of every axis, in the order of [`Sweep::keys`].
    pub settings: Vec<(String, String)>,
    /// The scenario, or why this combination is impossible.
    pub scenario: Result<Scenario, ScenarioError>,
}

/// A scenario and its variations.
#[derive(Clone, Debug, PartialEq)]
pub struct Sweep {
    /// The scenario without any axis; the first possible point when it is incomplete without them.
    pub base: Scenario,
    /// Axes, in order of appearance. Without axes the base is the only point.
    pub axes: Vec<Axis>,
    /// All combinations; the last axis runs fastest.
    pub points: Vec<SweepPoint>,
}

impl Sweep {
    /// Returns the paths of the keys of all axes, in the order of the axes.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.axes.iter().flat_map(|a| &a.keys).map(String::as_str)
    }
}

/// Loads the sweep that a file's `[sweep]` describes, with overrides.
///
/// # Errors
/// A file that cannot be read or has a fault; the base's error when no point is possible at all.
/// Impossible points of a sweep that has others carry their own.
pub fn load_sweep(path: &Path, overrides: &[String]) -> Result<Sweep, ScenarioError> {
    sweep_of(path, overrides, &[])
}

/// Loads a sweep as [`load_sweep`] does, with further axes written as `section.key=[v1, v2]`, or
/// over several keys as `s.a,s.b=[[a1, b1], [a2, b2]]`. An axis over all keys of one of the file's
/// axes replaces that one.
///
/// # Errors
/// As [`load_sweep`]; and an axis with a fault.
pub fn sweep_of(
    path: &Path,
    overrides: &[String],
    axes: &[String],
) -> Result<Sweep, ScenarioError> {
    let mut document = load::document(path, overrides)?;
    for axis in axes {
        load::axis_from(&mut document, axis)?;
    }
    sweep(&document)
}

/// Checks the key of an axis, written as for [`sweep_of`], and the form of its values. Only
/// [`sweep_of`] can check whether the values fit a scenario.
///
/// # Errors
/// As [`sweep_of`] for the same axis.
pub fn check_axis(axis: &str) -> Result<(), ScenarioError> {
    load::axis_from(&mut Document::new(String::new()), axis)
}

fn sweep(document: &Document) -> Result<Sweep, ScenarioError> {
    let axes: Vec<Axis> = document
        .axes
        .iter()
        .map(|a| Axis {
            keys: a.keys.iter().map(|k| k.path()).collect(),
            values: a
                .values
                .iter()
                .map(|v| texts(document, &a.keys, v))
                .collect(),
        })
        .collect();
    let count: usize = axes.iter().map(|a| a.values.len()).product();
    let mut points = Vec::with_capacity(count);
    for index in 0..count {
        points.push(point(document, &axes, index));
    }
    let base = match read::scenario(document.clone()) {
        Ok(base) => base,
        Err(error) => points
            .iter()
            .find_map(|p| p.scenario.as_ref().ok())
            .cloned()
            .ok_or(error)?,
    };
    Ok(Sweep { base, axes, points })
}

fn texts(document: &Document, keys: &[Key], values: &[Value]) -> Vec<String> {
    let pairs = keys.iter().zip(values);
    pairs.map(|(k, v)| text(document, *k, v)).collect()
}

/// A value as it can be given from outside too: a path of a file as the working directory has it.
fn text(document: &Document, key: Key, value: &Value) -> String {
    match key {
        Key::Hardware => read::profile(document, value),
        _ => document.text_of(value),
    }
}

/// The point of this number: the mixed-radix digits of `index`, last axis fastest.
fn point(document: &Document, axes: &[Axis], mut index: usize) -> SweepPoint {
    let mut digits = vec![0; axes.len()];
    for (digit, axis) in digits.iter_mut().zip(axes).rev() {
        *digit = index % axis.values.len();
        index /= axis.values.len();
    }
    let settings = axes
        .iter()
        .zip(&digits)
        .flat_map(|(a, i)| a.keys.iter().cloned().zip(a.values[*i].iter().cloned()))
        .collect();
    let mut varied = document.clone();
    let set = document.axes.iter().zip(&digits).try_for_each(|(axis, i)| {
        let mut pairs = axis.keys.iter().zip(&axis.values[*i]);
        pairs.try_for_each(|(key, value)| varied.set(*key, value.clone(), Layer::Axis))
    });
    SweepPoint {
        settings,
        scenario: set.and_then(|()| read::scenario(varied)),
    }
}
