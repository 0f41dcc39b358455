//! When backward waits for reductions of gradients under policy `native`.

use super::find::{checked, recorded, waits};
use super::steady;
use crate::ir::{COMPUTE, UnitId};
use crate::program::{Program, Rule};

const UNITS: &str = r#"fsdp.units=["layers.*", "tok_embeddings", "norm+output=keep"]"#;

/// Returns the unit and the number of reduced units that are younger than the awaited one, for each
/// wait that makes room for a gradient.
fn gates(p: &Program) -> Vec<(UnitId, usize)> {
    let step = steady(p);
    let of_gates = waits(p, COMPUTE).into_iter();
    let of_gates = of_gates.filter(|w| step[w.0].rule == Rule::ReduceGate);
    of_gates
        .map(|(at, event, _)| {
            let (now, from) = (step[at].unit, recorded(p, event));
            let since = step[from..at].iter().filter(|i| i.rule == Rule::Reduce);
            let mut younger: Vec<UnitId> = since.map(|i| i.unit).collect();
            younger.retain(|u| *u != now && *u != step[from].unit);
            younger.dedup();
            (now, younger.len())
        })
        .collect()
}

/// Weights gathered in 8 bits and the others are two groups of a unit, each with its own gradient
/// buffer and reduction. Backward of a unit would otherwise wait for a reduction that the unit
/// before it has just issued.
#[test]
fn units_are_in_flight_rather_than_buffers() {
    let eight_bits = [
        "precision.float8_recipe=tensorwise",
        "precision.float8_all_gather=true",
    ];
    for (in_flight, younger) in [(1, 0), (2, 1), (3, 2)] {
        let in_flight = format!("fsdp.reduce_in_flight={in_flight}");
        let base = [
            UNITS,
            "model.layers=6",
            "fsdp.policy=native",
            in_flight.as_str(),
        ];
        let one = checked(&base);
        let two = checked(&[base.as_slice(), &eight_bits].concat());
        let units = |p: &Program| {
            let mut units: Vec<UnitId> = gates(p).into_iter().map(|g| g.0).collect();
            units.dedup();
            units
        };
        assert!(!units(&one).is_empty(), "{in_flight}");
        assert_eq!(units(&one), units(&two), "{in_flight}");
        for p in [&one, &two] {
            assert!(gates(p).iter().all(|g| g.1 == younger), "{:?}", gates(p));
        }
    }
}
