//! Modules that stay eager while the rest is compiled.

use super::*;

const MLP: &str = "compile.exclude=[\"layers.*.mlp\"]";

fn of(set: &[&str]) -> Tape {
    let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
    build(&crate::scenario::load("llama-tiny".as_ref(), &set).unwrap())
}

/// Returns the names of the kernels launched within a module, in order.
fn within(t: &Tape, ops: &[TapeOp], path: &str) -> Vec<String> {
    let is_it = |m: ModuleId| t.modules[m.index()].path == path;
    let mut inside = false;
    let mut names = Vec::new();
    for op in ops {
        match *op {
            TapeOp::Enter(m) if is_it(m) => inside = true,
            TapeOp::Exit(m) if is_it(m) => inside = false,
            TapeOp::Launch { kernel, .. } if inside => {
                names.push(t.kernels[kernel.index()].name.to_string());
            }
            _ => {}
        }
    }
    names
}

fn breaks(ops: &[TapeOp]) -> u16 {
    let of = |op: &TapeOp| match *op {
        TapeOp::Host {
            kind: HostWorkKind::GraphBreak,
            count,
        } => count,
        _ => 0,
    };
    ops.iter().map(of).sum()
}

#[test]
fn excluded_modules_launch_the_kernels_of_eager_code() {
    let (eager, path) = (of(&[]), "layers.1.mlp");
    for mode in ["regions", "blocks", "full"] {
        let mode = format!("compile.mode={mode}");
        let (some, all) = (of(&[&mode, MLP]), of(&[&mode]));
        for phase in [|t: &Tape| t.forward.clone(), |t: &Tape| t.eval.clone()] {
            let names = |t: &Tape, path| within(t, &phase(t), path);
            assert_eq!(names(&some, path), names(&eager, path), "{mode}");
            assert_ne!(names(&all, path), names(&eager, path), "{mode}");
            let attention = "layers.1.attention";
            assert_ne!(names(&some, attention), names(&eager, attention), "{mode}");
        }
    }
}

/// The eager half of a block is one call in each pass: a block has one break in forward, one in
/// backward and one in validation. A graph of the whole step has none, and neither has a frame that
/// is eager as a whole.
#[test]
fn excluded_modules_break_the_graph_around_them() {
    let each = |set: &[&str]| {
        let t = of(set);
        [&t.forward, &t.backward, &t.eval].map(|ops| breaks(ops))
    };
    let layers = 4;
    let blocks = "compile.mode=blocks";
    assert_eq!(each(&["model.layers=4", blocks, MLP]), [layers; 3]);
    assert_eq!(
        each(&["model.layers=4", "compile.mode=regions", MLP]),
        [layers; 3]
    );
    assert_eq!(each(&["model.layers=4", "compile.mode=full", MLP]), [0; 3]);
    assert_eq!(each(&["model.layers=4", blocks]), [0; 3]);
    let whole = "compile.exclude=[\"layers.*\"]";
    assert_eq!(each(&["model.layers=4", blocks, whole]), [0; 3]);
    // One block of a deep model, whose tape is not made of repeated blocks.
    let one = "compile.exclude=[\"layers.7.mlp\"]";
    assert_eq!(each(&["model.layers=9", blocks, one]), [1; 3]);
}

#[test]
fn a_block_that_is_excluded_keeps_what_eager_code_keeps() {
    let saved = |set: &[&str]| -> u64 {
        let of = of(set).storages;
        let kept = of.iter().filter(|s| s.role == StorageRole::Saved);
        kept.map(|s| s.bytes.0).sum()
    };
    let whole = "compile.exclude=[\"*\", \"layers.*\"]";
    let eager = saved(&[]);
    assert_eq!(saved(&["compile.mode=blocks", whole]), eager);
    assert!(saved(&["compile.mode=blocks", MLP]) > saved(&["compile.mode=blocks"]));
}
