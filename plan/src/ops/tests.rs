//! Checks that hold for every operation.

use super::*;
use crate::ir::OpKind;
use std::collections::BTreeSet;

mod examples;
mod gradients;

/// Names that `examples` uses.
mod terms {
    pub(super) use crate::ir::OpKind;
    pub(super) use crate::ops::{Extent, Operand};
}

#[test]
fn names_are_unique_and_signatures_consistent() {
    let mut names = BTreeSet::new();
    for kind in OpKind::ALL {
        let def = kind.def();
        assert!(names.insert(def.name()), "{} is taken", def.name());
        let s = def.signature();
        assert!(s.optional_inputs <= s.inputs.len(), "{}", def.name());
        assert!(
            s.optional_outputs < s.outputs.len(),
            "{}: an operation has a result",
            def.name()
        );
        match s.reduced {
            Some(Reduced::Input(n)) => assert!(n < s.inputs.len(), "{}", def.name()),
            Some(Reduced::Output(n)) => assert!(n < s.outputs.len(), "{}", def.name()),
            None => {}
        }
        // An operation that reduces rows is a row or column operation, or writes into one element
        // of each row.
        let rows = matches!(def.fusion(), Fusion::Row | Fusion::Column);
        assert_eq!(
            s.reduced.is_some(),
            rows || *kind == OpKind::NllLossGrad,
            "{}",
            def.name()
        );
    }
}

#[test]
fn kernels_of_backward_passes_are_named_and_classed_as_such() {
    for kind in OpKind::ALL {
        let def = kind.def();
        let named = def.name().contains("backward");
        assert_eq!(def.is_backward(), named, "{}", def.name());
    }
}
