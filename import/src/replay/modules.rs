//! Modules and parameters from the units of a trace.

use crate::attribute::ROOT;
use crate::facts::{Facts, Reshard, UnitFacts, is_block};
use crate::measured::Measured;
use shardlab_plan::config::UnitPattern;
use shardlab_plan::ir::{Init, Module, ModuleId, ModuleKind, Param, ParamId, Placements};
use smallvec::smallvec;
use std::collections::BTreeMap;

/// Module tree of a trace: the root and one module per unit.
pub(super) struct Units {
    pub(super) modules: Vec<Module>,
    pub(super) params: Vec<Param>,
    /// Parameters of each module.
    pub(super) owned: Vec<Vec<ParamId>>,
    /// Module of each unit of the run, by the unit's index.
    pub(super) of_unit: BTreeMap<u32, ModuleId>,
    /// Module of the loss, if it is computed outside of the root.
    pub(super) loss: Option<ModuleId>,
    /// Patterns of `fsdp.units` that give the recorded units.
    pub(super) patterns: Vec<UnitPattern>,
}

impl Units {
    /// Returns the module of a unit of the run. Units without a module belong to the root.
    pub(super) fn module(&self, unit: u32) -> ModuleId {
        self.of_unit.get(&unit).copied().unwrap_or(ModuleId(0))
    }
}

/// Builds the modules of the units in forward order.
pub(super) fn build(facts: &Facts, measured: &Measured) -> Result<Units, String> {
    if facts.units.iter().all(|u| elements(u) == 0) {
        return Err(
            "the trace shows no parameters: nothing is gathered, and no shapes were recorded"
                .into(),
        );
    }
    let mut units = Units {
        modules: vec![Module {
            path: String::new(),
            parent: None,
            kind: ModuleKind::Root,
        }],
        params: Vec::new(),
        owned: vec![Vec::new()],
        of_unit: BTreeMap::new(),
        loss: None,
        patterns: Vec::new(),
    };
    // Units that are not resharded are marked; a setting for all units needs no marks.
    let marks = matches!(
        facts.reshard.as_ref().map(|r| r.value),
        Some(Reshard::Always | Reshard::Group(_))
    );
    let mut blocks = 0;
    for unit in &facts.units {
        let module = if unit.name == ROOT {
            ModuleId(0)
        } else {
            let kind = match is_block(&unit.name) {
                true => ModuleKind::Block,
                false => ModuleKind::Layer,
            };
            let path = match kind {
                ModuleKind::Block => {
                    blocks += 1;
                    format!("layers.{}", blocks - 1)
                }
                _ => plain(&unit.name),
            };
            if kind == ModuleKind::Layer {
                let keep = marks && unit.gathered > 0 && !unit.regathered;
                units.patterns.push(UnitPattern {
                    modules: vec![path.clone()],
                    keep,
                });
            }
            units.modules.push(Module {
                path,
                parent: Some(ModuleId(0)),
                kind,
            });
            units.owned.push(Vec::new());
            ModuleId((units.modules.len() - 1) as u32)
        };
        let known = measured.units.iter().position(|n| *n == unit.name);
        if let Some(index) = known {
            units.of_unit.insert(index as u32, module);
        }
        parameters(unit, module, &mut units);
    }
    if blocks > 0 {
        let all = UnitPattern {
            modules: vec!["layers.*".to_owned()],
            keep: false,
        };
        units.patterns.insert(0, all);
    }
    if measured.loss.is_some() {
        units.loss = Some(ModuleId(units.modules.len() as u32));
        units.modules.push(Module {
            path: "loss".into(),
            parent: Some(ModuleId(0)),
            kind: ModuleKind::Loss,
        });
        units.owned.push(Vec::new());
    }
    Ok(units)
}

fn elements(unit: &UnitFacts) -> u64 {
    let shaped: u64 = unit
        .parameters
        .iter()
        .map(|p| p.iter().product::<u64>())
        .sum();
    shaped.max(unit.gathered)
}

fn parameters(unit: &UnitFacts, module: ModuleId, units: &mut Units) {
    let shapes = match unit.parameters.is_empty() {
        false => unit.parameters.clone(),
        true if unit.gathered > 0 => vec![vec![unit.gathered]],
        true => Vec::new(),
    };
    let path = units.modules[module.index()].path.clone();
    for (i, shape) in shapes.into_iter().enumerate() {
        let id = ParamId(units.params.len() as u32);
        units.owned[module.index()].push(id);
        units.params.push(Param {
            name: match path.is_empty() {
                true => format!("parameter{i}"),
                false => format!("{path}.parameter{i}"),
            },
            modules: smallvec![module],
            shape: shape.into_iter().collect(),
            placements: Placements::REPLICATED,
            requires_grad: true,
            router_bias: false,
            group: 0,
            packed: None,
            init: Init::Zeros,
            hf: None,
        });
    }
}

/// Returns a unit's name as the path of one module.
fn plain(name: &str) -> String {
    name.chars()
        .map(|c| match c {
            c if c.is_ascii_alphanumeric() || c == '_' || c == '.' => c,
            _ => '_',
        })
        .collect()
}
