//! Views of parameters: gradients against finite differences.

use super::interp::{Inputs, loss, train};
use super::*;
use crate::compile::full;
use crate::models::build::Builder;
use crate::models::declare::{Declare, Layer, ROOT, Weights};
use crate::models::{Declared, Forward};

/// Parts of one vector scale and shift rows, one of them twice, and all of it does so once more.
struct Parts {
    vector: Layer,
}

impl Forward for Parts {
    fn forward(&self, b: &mut Builder<'_>) {
        let (rows, d) = (4, b.s.model.hidden);
        let x = b.input(&[rows, d]);
        let w = b.weight(self.vector);
        let y = b.within(self.vector.module(), |b| {
            let part = |b: &mut Builder<'_>, start| b.g.slice(w, 0, start, d);
            let [scale, shift, between] = [0, d, d / 2].map(|start| part(b, start));
            let y = b.g.binary(OpKind::Mul, x, scale);
            let y = b.g.binary(OpKind::Add, y, shift);
            let y = b.g.binary(OpKind::Mul, y, between);
            let y = b.g.binary(OpKind::Add, y, scale);
            // All rows next to each other, in pairs.
            let y = b.g.reshape(y, &[rows / 2, 2 * d]);
            let whole = b.g.reshape(w, &[1, 2 * d]);
            b.g.binary(OpKind::Mul, y, whole)
        });
        crate::models::mean_square(b, y);
    }
}

fn parts(s: &Scenario) -> Tape {
    let mut d = Declare::new(Weights::Uniform, None, s.device_mesh());
    let module = d.module(ROOT, "parts", ModuleKind::Layer);
    let vector = d.parameters(module, "", &[2 * s.model.hidden], false);
    let model = Declared::of(d.finish(), Box::new(Parts { vector }));
    full(s, model, side_by_side(&|m| m == ROOT))
}

/// Each part's gradient counts where the part is, and nowhere else.
#[test]
fn a_parameter_gets_the_gradients_of_its_parts() {
    for mode in [
        CompileMode::Off,
        CompileMode::Blocks,
        CompileMode::Regions,
        CompileMode::Full,
    ] {
        let mut s = tiny(Family::Linear);
        s.compile.mode = mode;
        let t = parts(&s);
        super::liveness::check(&t);
        let inputs = Inputs::new(&t, 0);
        let out = train(&t, &inputs);
        assert_eq!(out.grads.len(), 1);
        for (i, &exact) in out.grads[0].iter().enumerate() {
            let at = |h: f64| {
                let mut moved = inputs.clone();
                moved.params[0][i] += h;
                loss(&t, &moved, false)
            };
            let numeric = (at(1e-5) - at(-1e-5)) / 2e-5;
            assert!(
                (numeric - exact).abs() < 1e-6 * exact.abs().max(1e-2),
                "{mode:?} [{i}]: {numeric} {exact}"
            );
        }
        assert!(out.grads[0].iter().all(|g| g.abs() > 1e-9), "{mode:?}");
    }
}
