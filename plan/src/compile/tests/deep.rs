//! A deep tape made by repeating a block is the one built op by op.

use super::*;
use crate::compile::full;
use crate::config::{Lora, LoraTargets, ModuleSelector, Patterns, RecomputeLayers};
use crate::models::declare;

/// Compares the tape of a model with these units made from a shallow one with that built whole.
fn assert_repeats(s: &Scenario, unit: &dyn Fn(ModuleId) -> bool, name: &str) {
    let model = || declare(s, s.model.layers);
    let repeated = crate::compile::repeat(s, &model().tree, side_by_side(unit))
        .unwrap_or_else(|| panic!("no repeat: {name}"));
    let repeated = crate::compile::finish_repeated(s, model().tree, repeated);
    let built = full(s, model(), side_by_side(unit));
    assert_eq!(repeated.forward, built.forward, "{name}");
    assert_eq!(repeated, built, "{name}");
}

/// Returns the modules of these kinds as units.
fn units(s: &Scenario, of: &'static [ModuleKind]) -> impl Fn(ModuleId) -> bool {
    let kinds: Vec<ModuleKind> = modules_and_params(s).0.iter().map(|m| m.kind).collect();
    move |m| of.contains(&kinds[m.index()])
}

const MODES: [CompileMode; 4] = [
    CompileMode::Off,
    CompileMode::Blocks,
    CompileMode::Regions,
    CompileMode::Full,
];

#[test]
fn repeating_a_block_equals_building_it() {
    for family in FAMILIES {
        for mode in MODES {
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
                    let unit = units(&s, &[ModuleKind::Root, ModuleKind::Block, ModuleKind::Mlp]);
                    let name = format!("{family:?} {mode:?} {recompute:?} {layers} {merge:?}");
                    assert_repeats(&s, &unit, &name);
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
        for mode in MODES {
            for recompute in [Recompute::Pointwise, Recompute::Full, Recompute::Selective] {
                for first in [1, 3, 6, 8, 13] {
                    let mut s = tiny(family);
                    s.compile.mode = mode;
                    s.train.recompute = recompute;
                    s.train.recompute_layers = RecomputeLayers::First(first);
                    s.model.layers = layers;
                    let unit = units(&s, &[ModuleKind::Root, ModuleKind::Block]);
                    let name = format!("{family:?} {mode:?} {recompute:?} {first}");
                    assert_repeats(&s, &unit, &name);
                }
            }
        }
    }
}

/// With adapters, the first block's backward ends earlier than that of the others.
#[test]
fn repeating_a_block_with_adapters_equals_building_it() {
    let named = |name: &str| LoraTargets::Selected(ModuleSelector::Patterns(vec![name.to_owned()]));
    for (targets, recompute) in [
        (LoraTargets::AllLinear, Recompute::None),
        (LoraTargets::AllLinear, Recompute::Full),
        (named("attention.v"), Recompute::Selective),
        (named("w2"), Recompute::None),
    ] {
        let mut s = tiny(Family::Llama);
        s.train.recompute = recompute;
        s.model.layers = 8;
        s.lora = Some(Lora {
            targets,
            ..Lora::of_rank(4)
        });
        let name = format!("{:?} {recompute:?}", s.lora);
        assert_repeats(&s, &|m| m.0 == 0, &name);
    }
}

/// Blocks whose adapters have other scalings are not alike.
#[test]
fn blocks_with_other_scalings_are_built() {
    let mut s = tiny(Family::Llama);
    s.model.layers = 8;
    let repeats = |s: &Scenario| {
        let tree = declare(s, s.model.layers).tree;
        crate::compile::repeat(s, &tree, side_by_side(&|m| m.0 == 0)).is_some()
    };
    for (pattern, alike) in [("attention.v", true), ("layers.5.attention.v", false)] {
        let alpha_pattern = Patterns::new([(pattern, 2.0)]).unwrap();
        s.lora = Some(Lora {
            alpha_pattern,
            ..Lora::of_rank(4)
        });
        assert_eq!(repeats(&s), alike, "{pattern}");
    }
}
