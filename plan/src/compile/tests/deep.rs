//! A deep tape made by repeating a block is the one built op by op.

use super::*;
use crate::compile::full;
use crate::models::declare;

#[test]
fn repeating_a_block_equals_building_it() {
    for family in FAMILIES {
        for mode in [
            CompileMode::Off,
            CompileMode::Blocks,
            CompileMode::Regions,
            CompileMode::Full,
        ] {
            for recompute in [Recompute::None, Recompute::Full, Recompute::Selective] {
                for (layers, merge) in [
                    (6, MergeProjections::None),
                    (9, MergeProjections::None),
                    (7, MergeProjections::All),
                ] {
                    let mut s = tiny(family);
                    s.compile.mode = mode;
                    s.compile.merge_projections = merge;
                    s.train.recompute = recompute;
                    s.model.layers = layers;
                    let kinds: Vec<ModuleKind> =
                        modules_and_params(&s).0.iter().map(|m| m.kind).collect();
                    let unit = |m: ModuleId| {
                        matches!(
                            kinds[m.index()],
                            ModuleKind::Root | ModuleKind::Block | ModuleKind::Mlp
                        )
                    };
                    let model = || declare(&s, layers);
                    let repeated = crate::compile::repeat(&s, &model().tree, side_by_side(&unit))
                        .unwrap_or_else(|| {
                            panic!("no repeat {family:?} {mode:?} {recompute:?} {layers} {merge:?}")
                        });
                    let repeated = crate::compile::finish_repeated(&s, model().tree, repeated);
                    let built = full(&s, model(), side_by_side(&unit));
                    assert_eq!(
                        repeated.forward, built.forward,
                        "{family:?} {mode:?} {recompute:?} {layers} {merge:?}"
                    );
                    assert_eq!(
                        repeated, built,
                        "{family:?} {mode:?} {recompute:?} {layers} {merge:?}"
                    );
                }
            }
        }
    }
}
