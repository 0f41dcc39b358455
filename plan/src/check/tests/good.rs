//! Correct programs.

use crate::check::testing::{Shape, Toy};
use crate::check::{RULES, check};
use crate::ir::Pool;

fn variants() -> Vec<Shape> {
    let base = Shape::default();
    let mut out = vec![base];
    for prefetch in [false, true] {
        for in_flight in [1, 2, 3] {
            for micro_batches in [1, 2] {
                out.push(Shape {
                    prefetch,
                    in_flight,
                    micro_batches,
                    ..base
                });
            }
        }
    }
    out.push(Shape {
        recompute: true,
        ..base
    });
    out.push(Shape {
        validation: true,
        ..base
    });
    out.push(Shape {
        scope: true,
        ..base
    });
    out.push(Shape {
        scope: true,
        validation: true,
        recompute: true,
        ..base
    });
    out.push(Shape {
        one_communicator: true,
        ..base
    });
    out.push(Shape {
        pool: Pool::Planned,
        validation: true,
        ..base
    });
    out
}

#[test]
fn correct_programs_break_no_rule() {
    for shape in variants() {
        let r = check(&Toy::new(shape).b.program);
        assert!(r.is_ok(), "{shape:?}\n{r}");
        assert_eq!(r.warnings(), 0, "{shape:?}\n{r}");
    }
}

#[test]
fn most_rules_have_facts_to_look_at() {
    let shape = Shape {
        scope: true,
        validation: true,
        micro_batches: 2,
        ..Shape::default()
    };
    let r = check(&Toy::new(shape).b.program);
    let idle: Vec<_> = r
        .rules
        .iter()
        .filter(|x| x.checked == 0)
        .map(|x| x.id.id())
        .collect();
    // Symmetry is defined only for several programs. The norm of this program sums no squares, it
    // has no experts, its ranks exchange no rows, none of its matmuls is in 8 bits, its optimizer
    // is AdamW, its micro-batches use all units, and it does not check for NaN.
    let float8 = [
        "FP8-SCALE",
        "FP8-WEIGHT",
        "FP8-FORMAT",
        "FP8-SUM",
        "FP8-AMAX",
        "FP8-ROWS",
    ];
    let expected = [
        &["INV-28", "MOE-NORM"][..],
        &[
            "MOE-AUX",
            "MOE-BIAS",
            "MOE-TAIL",
            "MOE-EMPTY",
            "MOE-ROWS",
            "MOE-WINDOW",
            "MOE-COUNTS",
        ],
        &float8,
        &["MUON-MATRIX", "SKIP-UNIT", "NAN-CHECK"],
    ];
    assert_eq!(idle, expected.concat());
    assert_eq!(r.rules.len(), RULES.len());
}
