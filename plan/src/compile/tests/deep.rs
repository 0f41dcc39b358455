//! A deep tape made by repeating a block is the one built op by op.

use super::*;
use crate::compile::full;
use crate::config::{Lora, LoraTargets, RecomputeLayers};
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

/// Where the first blocks alone are recomputed, blocks of both kinds are repeated.
#[test]
fn repeating_blocks_of_two_kinds_equals_building_them() {
    let layers = 14;
    for family in FAMILIES {
        for mode in [
            CompileMode::Off,
            CompileMode::Blocks,
            CompileMode::Regions,
            CompileMode::Full,
        ] {
            for recompute in [Recompute::Pointwise, Recompute::Full, Recompute::Selective] {
                for first in [1, 3, 6, 8, 13] {
                    let mut s = tiny(family);
                    s.compile.mode = mode;
                    s.train.recompute = recompute;
                    s.train.recompute_layers = RecomputeLayers::First(first);
                    s.model.layers = layers;
                    let kinds: Vec<ModuleKind> =
                        modules_and_params(&s).0.iter().map(|m| m.kind).collect();
                    let unit = |m: ModuleId| {
                        matches!(kinds[m.index()], ModuleKind::Root | ModuleKind::Block)
                    };
                    let model = || declare(&s, layers);
                    let name = format!("{family:?} {mode:?} {recompute:?} {first}");
                    let repeated = crate::compile::repeat(&s, &model().tree, side_by_side(&unit))
                        .unwrap_or_else(|| panic!("no repeat: {name}"));
                    let repeated = crate::compile::finish_repeated(&s, model().tree, repeated);
                    let built = full(&s, model(), side_by_side(&unit));
                    assert_eq!(repeated, built, "{name}");
                }
            }
        }
    }
}

/// With adapters, the first block's backward ends earlier than that of the others.
#[test]
fn repeating_a_block_with_adapters_equals_building_it() {
    for (targets, recompute) in [
        (LoraTargets::AllLinear, Recompute::None),
        (LoraTargets::AllLinear, Recompute::Full),
        (
            LoraTargets::Patterns(vec!["attention.v".to_owned()]),
            Recompute::Selective,
        ),
        (
            LoraTargets::Patterns(vec!["w2".to_owned()]),
            Recompute::None,
        ),
    ] {
        let mut s = tiny(Family::Llama);
        s.train.recompute = recompute;
        s.model.layers = 8;
        s.lora = Some(Lora {
            r: 4,
            alpha: 8.0,
            targets,
            dropout: 0.0,
            use_rslora: false,
            use_dora: false,
        });
        let unit = |m: ModuleId| m.0 == 0;
        let model = || declare(&s, s.model.layers);
        let repeated = crate::compile::repeat(&s, &model().tree, side_by_side(&unit)).unwrap();
        let repeated = crate::compile::finish_repeated(&s, model().tree, repeated);
        let built = full(&s, model(), side_by_side(&unit));
        assert_eq!(repeated, built, "{:?} {recompute:?}", s.lora);
    }
}
