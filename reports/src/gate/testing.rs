//! Facts for tests.

use super::facts::*;
use std::collections::BTreeMap;

fn map<T: Copy>(entries: &[(&str, T)]) -> BTreeMap<String, T> {
    entries.iter().map(|(k, v)| ((*k).to_owned(), *v)).collect()
}

fn memory(allocated: u64) -> MemoryFacts {
    MemoryFacts {
        allocated,
        reserved: 1200,
        device: 2000,
        capacity: None,
        persistent: 400,
        at: "backward layers.1".to_owned(),
        by_role: map(&[("activation", 600), ("main_weight", 400)]),
        by_unit: map(&[("layers.1", 1000)]),
    }
}

/// Returns the facts of a scenario of two ranks with one measured run of four steps.
pub(crate) fn facts() -> Facts {
    Facts {
        scenario: "tiny".to_owned(),
        set: vec!["train.steps=4".to_owned()],
        options: BTreeMap::from([("train.lr".to_owned(), "0.001".to_owned())]),
        policy: "native".to_owned(),
        hardware: "cpu".to_owned(),
        world_size: 2,
        program: ProgramFacts {
            digest: "0123456789abcdef".to_owned(),
            instructions: BTreeMap::from([(
                "steady".to_owned(),
                map(&[("alloc", 2), ("launch", 3)]),
            )]),
            outline:
                "[steady step] = forward root; alloc act 600; mm: input -> act; 2x{fill: -> act}\n"
                    .to_owned(),
        },
        memory: memory(1000),
        time: TimeFacts {
            step_ps: 2_000_000_000,
            host_ps: 500_000_000,
            exposed_ps: map(&[("wire", 100_000_000)]),
        },
        check: CheckFacts::default(),
        basis: None,
        measured: Some(Measured {
            environment: BTreeMap::from([("device".to_owned(), "cpu".to_owned())]),
            digest: "0123456789abcdef".to_owned(),
            memory: Some(memory(1001)),
            curves: vec![Curve {
                seed: 0,
                losses: vec![5.5, 5.0, 4.5, 0.1 + 0.2],
                grad_norms: vec![1.0, 1.5, 1.25, 1.0],
                ended: None,
            }],
        }),
    }
}
