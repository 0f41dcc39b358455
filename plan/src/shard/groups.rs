//! Units of the module tree and the parameter groups they own.

use super::pattern::{has_place_for_parameters, hint};
use super::{FlatItem, Group, Layout, LayoutError, ShardError, flat_layout, per_param_layout};
use crate::config::pattern::{covers, matches};
use crate::config::{Atomic, IgnoredParams, UnitPattern, Units};
use crate::ir::{
    AxisId, Module, ModuleId, ModuleKind, Param, ParamId, Placement, Placements, UnitId,
};

/// A unit before its parameters are known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitSpec {
    /// Path of its module (`root` for the root), or the joined paths of several.
    pub name: String,
    /// Modules, in forward order.
    pub modules: Vec<ModuleId>,
    /// Whether it is the root unit, which owns all parameters that no other unit owns.
    pub is_root: bool,
    /// Whether it stays full after forward.
    pub keep: bool,
    /// Whether it wraps a repeated block.
    pub is_block: bool,
}

/// Layout of the groups' buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayoutKind {
    /// One flat buffer per group.
    Flat {
        /// Number of ranks that share it.
        shards: u32,
        /// Whether it is padded to equal shards; `false` if nothing is sharded.
        pad: bool,
        /// The unit that shards do not split.
        atomic: Atomic,
    },
    /// Each parameter is split separately.
    PerParam {
        /// Number of ranks that share it.
        shards: u32,
    },
}

impl LayoutKind {
    /// Returns the layout in which ranks hold whole parameters. A per-parameter layout stays as it
    /// is.
    const fn of_whole_parameters(self) -> Self {
        match self {
            Self::Flat { shards, pad, .. } => Self::Flat {
                shards,
                pad,
                atomic: Atomic::Tensor,
            },
            Self::PerParam { .. } => self,
        }
    }

    /// Returns the layout whose shards do not split blocks of this many rows. Larger blocks, and
    /// whole parameters, stay whole.
    const fn of_blocks(self, rows: u32) -> Self {
        match self {
            Self::Flat {
                shards,
                pad,
                atomic: Atomic::Row,
            } => Self::Flat {
                shards,
                pad,
                atomic: Atomic::Block(rows),
            },
            _ => self,
        }
    }

    /// Returns the layout in which every rank has all parameters.
    const fn replicated(self) -> Self {
        match self {
            Self::Flat { atomic, .. } => Self::Flat {
                shards: 1,
                pad: false,
                atomic,
            },
            Self::PerParam { .. } => Self::PerParam { shards: 1 },
        }
    }

    fn layout(
        self,
        params: &[ParamId],
        table: &[Param],
        contiguous_with_next: &[bool],
    ) -> Result<Layout, LayoutError> {
        let shape = |&p: &ParamId| &table[p.index()].shape;
        let dims = |p| {
            let row = shape(p)
                .iter()
                .skip(1)
                .try_fold(1u64, |n, &d| n.checked_mul(d))
                .ok_or(LayoutError::TooLarge)?;
            Ok((shape(p).first().copied().unwrap_or(1), row))
        };
        match self {
            Self::Flat {
                shards,
                pad,
                atomic,
            } => {
                // A run of adjacent parameters is laid out as one parameter, and then split into
                // its members.
                let mut runs: Vec<(ParamId, u64, u64)> = Vec::new();
                let mut members: Vec<Vec<FlatItem>> = Vec::new();
                for id in params {
                    let (param, (dim0, row)) = (*id, dims(id)?);
                    let numel = dim0.checked_mul(row).ok_or(LayoutError::TooLarge)?;
                    let row = grain(&table[id.index()], atomic);
                    let member = |offset| FlatItem {
                        param,
                        offset,
                        numel,
                    };
                    let before = param.index().wrapping_sub(1);
                    let behind = |run: &[FlatItem]| {
                        run.last().is_some_and(|l| l.param.index() == before)
                            && contiguous_with_next.get(before) == Some(&true)
                    };
                    match (runs.last_mut(), members.last_mut()) {
                        (Some(run), Some(of)) if run.2 == row && behind(of) => {
                            of.push(member(run.1));
                            run.1 = run.1.checked_add(numel).ok_or(LayoutError::TooLarge)?;
                        }
                        _ => {
                            runs.push((param, numel, row));
                            members.push(vec![member(0)]);
                        }
                    }
                }
                // A run whose members start within blocks is not split by shards.
                for (run, of) in runs.iter_mut().zip(&members) {
                    if of.iter().any(|member| !member.offset.is_multiple_of(run.2)) {
                        run.2 = run.1;
                    }
                }
                let mut layout = flat_layout(&runs, shards, pad, atomic)?;
                for (run, of) in layout.items.iter().zip(&mut members) {
                    of.iter_mut().for_each(|item| item.offset += run.offset);
                }
                layout.items = members.into_iter().flatten().collect();
                Ok(Layout::Flat(layout))
            }
            Self::PerParam { shards } => {
                let items = params
                    .iter()
                    .map(|p| dims(p).map(|(dim0, row)| (*p, dim0, row)))
                    .collect::<Result<Vec<_>, _>>()?;
                per_param_layout(&items, shards).map(Layout::PerParam)
            }
        }
    }
}

/// Returns the number of elements of a parameter that shards do not split.
fn grain(param: &Param, atomic: Atomic) -> u64 {
    let row = param.flat_row();
    match atomic {
        Atomic::Row | Atomic::Tensor => row,
        // Blocks only apply to matrices. A matrix with fewer rows is one block.
        Atomic::Block(_) if row == 1 => row,
        Atomic::Block(n) => row * u64::from(n).min(param.numel() / row.max(1)).max(1),
    }
}

/// Returns the units that `units` describes: the root first, then the others in forward order (the
/// order of their first modules).
///
/// # Errors
/// Fails with [`ShardError::NoSuchModule`] for a pattern without a match, with
/// [`ShardError::TwoUnits`] for a module that two patterns match, and with
/// [`ShardError::TooManyUnits`].
pub fn assign_units(units: &Units, modules: &[Module]) -> Result<Vec<UnitSpec>, ShardError> {
    let mut specs = match units {
        Units::Root => Vec::new(),
        Units::Block => (0..)
            .zip(modules)
            .filter(|(_, m)| m.kind == ModuleKind::Block)
            .map(|(i, _)| unit(vec![ModuleId(i)], false, modules))
            .collect(),
        Units::BlockAndEnds => {
            let of = |kinds: &[ModuleKind]| -> Vec<ModuleId> {
                let found = (0..).zip(modules).filter(|(_, m)| kinds.contains(&m.kind));
                found.map(|(i, _)| ModuleId(i)).collect()
            };
            let at_root = |m: &ModuleId| modules[m.index()].parent == Some(ModuleId(0));
            let each = of(&[ModuleKind::Block, ModuleKind::Embedding]);
            let each = each.into_iter().map(|m| unit(vec![m], false, modules));
            let last = of(&[ModuleKind::Norm, ModuleKind::Head]);
            let last: Vec<ModuleId> = last.into_iter().filter(at_root).collect();
            let last = (!last.is_empty()).then(|| unit(last, true, modules));
            each.chain(last).collect()
        }
        Units::Patterns(patterns) => from_patterns(patterns, modules)?,
    };
    specs.sort_by_key(|s| s.modules[0]);
    specs.insert(
        0,
        UnitSpec {
            name: "root".into(),
            modules: vec![ModuleId(0)],
            is_root: true,
            keep: false,
            is_block: false,
        },
    );
    if specs.len() > usize::from(u16::MAX) {
        return Err(ShardError::TooManyUnits(specs.len()));
    }
    Ok(specs)
}

/// Creates a unit of modules in forward order. There is at least one module.
fn unit(ids: Vec<ModuleId>, keep: bool, modules: &[Module]) -> UnitSpec {
    let paths: Vec<&str> = ids
        .iter()
        .map(|m| modules[m.index()].path.as_str())
        .collect();
    let is_block = ids
        .iter()
        .any(|m| modules[m.index()].kind == ModuleKind::Block);
    UnitSpec {
        name: paths.join("+"),
        modules: ids,
        is_root: false,
        keep,
        is_block,
    }
}

/// Rejects a glob of `fsdp.frozen` that matches no module.
///
/// # Errors
/// Returns [`ShardError::NoSuchModule`] if a glob does not.
pub fn check_frozen(globs: &[String], modules: &[Module]) -> Result<(), ShardError> {
    each_matches("frozen", globs, modules)
}

/// Rejects a glob of `fsdp.ignored_params` that matches no module.
///
/// # Errors
/// Returns [`ShardError::NoSuchModule`] if a glob does not.
pub fn check_ignored(of: &IgnoredParams, modules: &[Module]) -> Result<(), ShardError> {
    match of {
        IgnoredParams::Experts => Ok(()),
        IgnoredParams::Patterns(globs) => each_matches("ignored_params", globs, modules),
    }
}

/// Returns, by parameter, whether `fsdp.ignored_params` names it. Empty if it names none.
#[must_use]
pub fn ignored_params(of: &IgnoredParams, modules: &[Module], params: &[Param]) -> Vec<bool> {
    if of.is_none() {
        return Vec::new();
    }
    let is_ignored = |p: &Param| match of {
        IgnoredParams::Experts => p.placements.on(AxisId::EP) != Placement::Replicate,
        IgnoredParams::Patterns(globs) => {
            let mut paths = p.modules.iter().map(|m| &modules[m.index()].path);
            paths.any(|path| globs.iter().any(|glob| covers(glob, path)))
        }
    };
    params.iter().map(is_ignored).collect()
}

/// Rejects a glob that covers no module.
fn each_matches(
    what: &'static str,
    globs: &[String],
    modules: &[Module],
) -> Result<(), ShardError> {
    let known = |glob: &str| {
        modules
            .iter()
            .any(|m| covers(glob, &m.path) && has_place_for_parameters(m))
    };
    match globs.iter().find(|glob| !known(glob)) {
        Some(glob) => Err(no_such_module(what, glob, modules)),
        None => Ok(()),
    }
}

/// Rejects a glob of `train.recompute_layers` that covers no block.
///
/// # Errors
/// Returns [`ShardError::NoSuchBlock`] if it covers none.
pub fn check_recomputed(glob: &str, modules: &[Module]) -> Result<(), ShardError> {
    let block = |m: &&Module| m.kind == ModuleKind::Block;
    if modules.iter().filter(block).any(|m| covers(glob, &m.path)) {
        return Ok(());
    }
    let blocks: Vec<Module> = modules.iter().filter(block).cloned().collect();
    Err(ShardError::NoSuchBlock {
        pattern: glob.to_owned(),
        hint: hint(glob, &blocks),
    })
}

/// Rejects a glob of `compile.exclude` that covers no module.
///
/// # Errors
/// Returns [`ShardError::NoSuchModule`] if a glob does not.
pub fn check_excluded(glob: &str, modules: &[Module]) -> Result<(), ShardError> {
    match modules.iter().any(|m| covers(glob, &m.path)) {
        true => Ok(()),
        false => Err(no_such_module("exclude", glob, modules)),
    }
}

/// Rejects an entry of `fsdp.units` with a glob that matches no module.
///
/// # Errors
/// Returns [`ShardError::NoSuchModule`] if a glob does not.
pub fn check_unit(pattern: &UnitPattern, modules: &[Module]) -> Result<(), ShardError> {
    let mut globs = pattern.modules.iter();
    globs.try_for_each(|glob| wrapped(glob, modules).map(drop))
}

/// Returns the modules that a glob of `fsdp.units` wraps. There is at least one.
fn wrapped(glob: &str, modules: &[Module]) -> Result<Vec<ModuleId>, ShardError> {
    // The root module is always a unit already.
    let inner = (1..).zip(modules.get(1..).unwrap_or_default());
    let found: Vec<ModuleId> = inner
        .filter(|(_, m)| matches(glob, &m.path) && has_place_for_parameters(m))
        .map(|(i, _)| ModuleId(i))
        .collect();
    if found.is_empty() {
        return Err(no_such_module("unit", glob, modules));
    }
    Ok(found)
}

fn no_such_module(what: &'static str, pattern: &str, modules: &[Module]) -> ShardError {
    ShardError::NoSuchModule {
        what,
        pattern: pattern.to_owned(),
        hint: hint(pattern, modules),
    }
}

fn from_patterns(
    patterns: &[UnitPattern],
    modules: &[Module],
) -> Result<Vec<UnitSpec>, ShardError> {
    let mut specs = Vec::new();
    let mut holder: Vec<Option<usize>> = vec![None; modules.len()];
    for pattern in patterns {
        let mut all = Vec::new();
        for glob in &pattern.modules {
            all.extend(wrapped(glob, modules)?);
        }
        all.sort_unstable();
        all.dedup();
        let parts = if pattern.modules.len() == 1 {
            all.into_iter().map(|m| vec![m]).collect()
        } else {
            vec![all]
        };
        for ids in parts {
            let spec = unit(ids, pattern.keep, modules);
            for m in &spec.modules {
                if let Some(other) = holder[m.index()].replace(specs.len()) {
                    let other: &UnitSpec = &specs[other];
                    return Err(ShardError::TwoUnits {
                        module: modules[m.index()].path.clone(),
                        first: other.name.clone(),
                        second: spec.name,
                    });
                }
            }
            specs.push(spec);
        }
    }
    Ok(specs)
}

/// Returns the unit that owns each parameter: the innermost one that contains its module. For a
/// tied parameter, this is the innermost one that contains all of its modules, because the
/// parameter must be full for every use.
#[must_use]
pub fn owners(specs: &[UnitSpec], modules: &[Module], params: &[Param]) -> Vec<UnitId> {
    let mut own: Vec<Option<u16>> = vec![None; modules.len()];
    for (u, spec) in (0u16..).zip(specs) {
        for m in &spec.modules {
            own[m.index()] = Some(u);
        }
    }
    // Modules are in pre-order: a parent comes before its children, so each row can inherit from an
    // earlier one.
    let mut inner = vec![0u16; modules.len()];
    for (m, module) in modules.iter().enumerate() {
        inner[m] = own[m]
            .or(module.parent.map(|p| inner[p.index()]))
            .unwrap_or(0);
    }
    let parent_unit: Vec<u16> = specs
        .iter()
        .map(|s| {
            s.modules
                .first()
                .and_then(|m| modules.get(m.index())?.parent)
                .map_or(0, |p| inner[p.index()])
        })
        .collect();
    let chain = |unit: u16| {
        std::iter::successors(Some(unit), |&u| {
            (u != 0).then(|| parent_unit[usize::from(u)])
        })
        .collect::<Vec<_>>()
    };
    params
        .iter()
        .map(|p| {
            let mut units = p.modules.iter().map(|m| inner[m.index()]);
            let first = units.next().unwrap_or(0);
            let common = units.fold(first, |a, b| {
                if a == b {
                    return a;
                }
                let around_b = chain(b);
                chain(a)
                    .into_iter()
                    .find(|u| around_b.contains(u))
                    .unwrap_or(0)
            });
            UnitId(common)
        })
        .collect()
}

/// Parameters of a unit that have separate groups.
#[derive(Clone, Copy, Debug)]
pub struct Apart<'a> {
    /// Whether frozen parameters do.
    pub frozen: bool,
    /// By parameter: whether ranks gather it in 8 bits. Empty if none is.
    pub float8: &'a [bool],
    /// Whether 8-bit parameters share groups with others, as in torch, which then gathers bytes.
    pub float8_mixed: bool,
    /// Rows of an 8-bit parameter that share scales, so that shards do not split them; `None` if
    /// there is one scale per tensor.
    pub float8_rows: Option<u32>,
    /// By parameter: whether Muon updates it. Empty if none is.
    pub muon: &'a [bool],
    /// Whether matrices that Muon updates share groups with other parameters, and ranks hold some
    /// of their rows. Ranks have whole matrices that the policy does not manage in any case.
    pub muon_mixed: bool,
    /// By parameter: whether the policy does not manage it. Empty if it manages all.
    pub ignored: &'a [bool],
}

/// Returns the laid-out parameter groups of all units, in the order of units. Within a unit, groups
/// differ by `requires_grad` (if [`Apart::frozen`]), by placements along model-parallel axes, by
/// whether ranks gather them in 8 bits (unless [`Apart::float8_mixed`]), by update rule of the
/// optimizer (unless [`Apart::muon_mixed`]), and by whether the policy manages them; they are in
/// the order of their first parameters, with parameters in registration order. Units without
/// parameters have no group. Each 8-bit parameter has a scale. Ranks hold whole parameters of
/// groups that Muon updates, whole blocks of rows of 8-bit ones with a scale per block
/// ([`Apart::float8_rows`]), all router biases that steps update, and all parameters that the
/// policy does not manage. `kind` returns the layout of parameters with given placements. A flat
/// layout leaves no gap between a parameter and the next one if `contiguous_with_next` (by
/// parameter) is set and both have rows of the same length.
///
/// # Errors
/// Fails with [`ShardError::Layout`], which names the unit.
pub fn build_groups(
    specs: &[UnitSpec],
    modules: &[Module],
    params: &[Param],
    kind: impl Fn(Placements) -> LayoutKind,
    contiguous_with_next: &[bool],
    apart: Apart<'_>,
) -> Result<Vec<Group>, ShardError> {
    type Alike = (bool, (Placements, bool, [bool; 3]), Vec<ParamId>);
    let mut members: Vec<Vec<Alike>> = vec![Vec::new(); specs.len()];
    for ((i, param), unit) in (0..).zip(params).zip(owners(specs, modules, params)) {
        let of_unit = &mut members[unit.index()];
        let is = |of: &[bool]| of.get(i as usize) == Some(&true);
        let codes = is(apart.float8) && !apart.float8_mixed;
        let muon = is(apart.muon) && (!apart.muon_mixed || is(apart.ignored));
        let kinds = [muon, param.router_bias, is(apart.ignored)];
        let like = (param.placements, codes, kinds);
        match of_unit.iter_mut().find(|(grad, known, _)| {
            let alike = !apart.frozen || *grad == param.requires_grad;
            alike && *known == like
        }) {
            Some((grad, _, ids)) => {
                *grad |= param.requires_grad;
                ids.push(ParamId(i));
            }
            None => of_unit.push((param.requires_grad, like, vec![ParamId(i)])),
        }
    }
    let (mut groups, mut scales) = (Vec::new(), 0u32..);
    for ((unit, of_unit), spec) in (0u16..).zip(members).zip(specs) {
        for (requires_grad, (placements, codes, [muon, router_biases, ignored]), ids) in of_unit {
            let kind = match kind(placements) {
                kind if router_biases || ignored => kind.replicated(),
                kind if muon => kind.of_whole_parameters(),
                kind => match apart.float8_rows.filter(|_| codes) {
                    Some(rows) => kind.of_blocks(rows),
                    None => kind,
                },
            };
            let layout = kind
                .layout(&ids, params, contiguous_with_next)
                .map_err(|source| ShardError::Layout {
                    unit: spec.name.clone(),
                    source,
                })?;
            let is_codes = |p: &ParamId| apart.float8.get(p.index()) == Some(&true);
            let of_param = |p: &ParamId| is_codes(p).then(|| scales.next()).flatten();
            let has_rows = |p: &ParamId| !muon && apart.muon.get(p.index()) == Some(&true);
            groups.push(Group {
                unit: UnitId(unit),
                scales: match ids.iter().any(is_codes) {
                    true => ids.iter().map(of_param).collect(),
                    false => Vec::new(),
                },
                muon_rows: match ids.iter().any(has_rows) {
                    true => ids.iter().map(has_rows).collect(),
                    false => Vec::new(),
                },
                params: ids,
                requires_grad,
                layout,
                muon,
                router_biases,
                ignored,
            });
        }
    }
    Ok(groups)
}

#[cfg(test)]
mod tests;
