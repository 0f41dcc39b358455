//! Determines whether parameters, gradients and optimizer states are in host memory.

use super::count::Counts;
use super::{Facts, Found};
use crate::attribute::{Attributed, Work};
use crate::kineto::{DeviceKind, Trace};
use shardlab_plan::program::Phase;

/// Share of the expected bytes that copies move at least. Small parameters may be copied otherwise.
const SHARE: f64 = 0.9;

/// Looks for the copies of `CPUOffloadPolicy`: the host copies shards to the device before each
/// all-gather, gradients go back after each reduce-scatter, and no optimizer runs on the device.
pub(super) fn find(
    trace: &Trace,
    a: &Attributed,
    step: Option<u32>,
    counts: &Counts<'_>,
    facts: &mut Facts,
) {
    let of_step = || {
        a.work
            .iter()
            .filter(|w| step.is_none_or(|s| w.place.step == s))
    };
    let updates = of_step().any(|w| {
        let kind = trace.device[w.device as usize].kind;
        w.place.phase == Phase::Optimizer && matches!(kind, DeviceKind::Kernel | DeviceKind::Graph)
    });
    if updates || facts.optimizer.is_none() {
        return;
    }
    let copied = |direction: &str| -> u64 {
        let copies = of_step().map(|w| &trace.device[w.device as usize]);
        copies
            .filter(|e| e.kind == DeviceKind::Copy && trace.name(e.name).contains(direction))
            .map(|e| e.bytes)
            .sum()
    };
    let described = |work| counts.of(work).filter_map(|c| c.described);
    // A rank's own part of what is gathered and reduced.
    let shards: u64 = described(Work::AllGather).map(|d| d.elements_in).sum();
    let gradients: u64 = described(Work::ReduceScatter).map(|d| d.elements_out).sum();
    let (in_bytes, out_bytes) = (copied("HtoD"), copied("DtoH"));
    let (Some(weights), Some(grads)) = (width(in_bytes, shards), width(out_bytes, gradients))
    else {
        return;
    };
    let mib = |bytes: u64| bytes >> 20;
    facts.offload = Some(format!(
        "{} MiB per step are copied to the device, {} MiB to the host, and no optimizer runs on the device",
        mib(in_bytes),
        mib(out_bytes)
    ));
    let because = |what: &str, n: u64| format!("{n} bytes per {what} are copied");
    if let Some(name) = name(weights, facts) {
        let found = Found::new(name, because("element of a shard", weights));
        facts.main_params.get_or_insert(found);
    }
    if let Some(name) = name(grads, facts) {
        let found = Found::new(name, because("reduced element", grads));
        facts.main_grads.get_or_insert(found);
    }
}

/// Returns the bytes per element if copies move as many elements of 2 or 4 bytes.
fn width(bytes: u64, elements: u64) -> Option<u64> {
    if elements == 0 {
        return None;
    }
    let per_element = bytes as f64 / elements as f64;
    // Token ids and other inputs are copied, too.
    [4, 2]
        .into_iter()
        .find(|w| (SHARE..2.0 * SHARE).contains(&(per_element / *w as f64)))
}

/// Returns the name of a type of this many bytes.
fn name(bytes: u64, facts: &Facts) -> Option<&'static str> {
    match bytes {
        4 => Some("f32"),
        _ => facts
            .compute
            .as_ref()
            .map(|f| f.value)
            .filter(|t| *t != "f32"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes and elements per step of a job with `CPUOffloadPolicy` on two H200.
    #[test]
    fn copies_say_how_wide_elements_are() {
        assert_eq!(width(312_571_676, 77_865_472), Some(4));
        assert_eq!(width(221_267_968, 55_316_992), Some(4));
        assert_eq!(width(110_633_984, 55_316_992), Some(2));
        // Inputs alone are no parameters.
        assert_eq!(width(32_784, 77_865_472), None);
        assert_eq!(width(0, 0), None);
    }
}
