//! Prints the layout of parameters in the buffers that are gathered and reduced.

use super::super::output::{Failure, Out};
use super::super::table::Table;
use crate::analysis::warnings::Warning;
use serde::Serialize;
use shardlab_plan::config::Atomic;
use shardlab_plan::ir::{AxisId, DType, ParameterCount, UnitId};
use shardlab_plan::shard::{Group, Layout};
use shardlab_plan::units::{Bytes, count};
use shardlab_plan::{Program, Scenario};

/// All parameter groups of a program.
#[derive(Serialize)]
pub(super) struct Report {
    scenario: String,
    program_digest: String,
    /// Element type of the gathered weights.
    compute: &'static str,
    shards: u32,
    /// Numbers of parameters.
    parameters: ParameterCount,
    /// What the model's file contains that no key expresses.
    warnings: Vec<Warning>,
    groups: Vec<GroupReport>,
}

#[derive(Serialize)]
struct GroupReport {
    group: usize,
    unit: String,
    layout: &'static str,
    requires_grad: bool,
    /// Number of elements that a shard boundary never divides (flat layouts).
    #[serde(skip_serializing_if = "Option::is_none")]
    chunk_factor: Option<u64>,
    payload_numel: u64,
    full_numel: u64,
    shard_numel: u64,
    /// Bytes of the gathered weights, including padding; 0 if nothing gathers them.
    full_bytes: u64,
    params: Vec<ParamReport>,
}

#[derive(Serialize, PartialEq)]
struct ParamReport {
    name: String,
    shape: Vec<u64>,
    /// First element in the full buffer, or in the shard for per-parameter layouts.
    offset: u64,
    numel: u64,
    requires_grad: bool,
    /// Number of its elements on each rank of the shard axis, with equal neighbours merged:
    /// `[ranks, elements]`.
    per_rank: Vec<(u32, u64)>,
}

pub(super) fn report(
    scenario: &Scenario,
    program: &Program,
    units: Option<&[UnitId]>,
    warnings: Vec<Warning>,
) -> Report {
    let shown = |g: &&(usize, &Group)| units.is_none_or(|u| u.contains(&g.1.unit));
    let groups: Vec<(usize, &Group)> = program.groups.iter().enumerate().collect();
    Report {
        scenario: scenario.name.clone(),
        program_digest: program.digest(),
        compute: program.meta.compute.name(),
        shards: program.meta.mesh.size(AxisId::DP_SHARD),
        parameters: program.meta.parameters,
        warnings,
        groups: groups
            .iter()
            .filter(shown)
            .map(|&(i, g)| group_report(program, i, g))
            .collect(),
    }
}

/// Returns the type of a group's parameters as the model reads them.
fn element(program: &Program, group: &Group) -> DType {
    match group.router_biases {
        true => DType::F32,
        false => program.meta.compute,
    }
}

fn group_report(program: &Program, index: usize, group: &Group) -> GroupReport {
    let layout = &group.layout;
    let (name, chunk_factor, shards) = match layout {
        Layout::Flat(l) if group.router_biases => ("flat, on all ranks", None, l.shards),
        Layout::Flat(l) if l.atomic == Atomic::Tensor => ("flat, whole parameters", None, l.shards),
        Layout::Flat(l) => ("flat", Some(l.chunk_factor), l.shards),
        Layout::PerParam(l) if group.ignored => ("not managed", None, l.shards),
        Layout::PerParam(l) => ("per_param", None, l.shards),
    };
    let offset = |i: usize| match layout {
        Layout::Flat(l) => l.items[i].offset,
        Layout::PerParam(l) => l.items[i].shard_offset,
    };
    let params = group.params.iter().enumerate().map(|(i, p)| {
        let param = &program.params[p.index()];
        let mut per_rank: Vec<(u32, u64)> = Vec::new();
        for rank in 0..shards {
            let held = layout.local_numel(i, rank);
            match per_rank.last_mut() {
                Some((n, of)) if *of == held => *n += 1,
                _ => per_rank.push((1, held)),
            }
        }
        ParamReport {
            name: param.name.clone(),
            shape: param.shape.to_vec(),
            offset: offset(i),
            numel: param.numel(),
            requires_grad: param.requires_grad,
            per_rank,
        }
    });
    GroupReport {
        group: index,
        unit: program.units[group.unit.index()].name.clone(),
        layout: name,
        requires_grad: group.requires_grad,
        chunk_factor,
        payload_numel: layout.payload_numel(),
        full_numel: layout.full_numel(),
        shard_numel: layout.shard_numel(),
        full_bytes: match group.ignored {
            true => 0,
            false => layout.full_numel() * element(program, group).size(),
        },
        params: params.collect(),
    }
}

/// Groups that differ only in their names: the first group, and the units of the others.
struct Alike<'a> {
    first: &'a GroupReport,
    others: Vec<&'a GroupReport>,
}

/// Merges adjacent groups with the same layout.
fn folded(groups: &[GroupReport]) -> Vec<Alike<'_>> {
    let mut folded: Vec<Alike<'_>> = Vec::new();
    for g in groups {
        match folded.last_mut() {
            Some(last) if alike(last.first, g) => last.others.push(g),
            _ => folded.push(Alike {
                first: g,
                others: Vec::new(),
            }),
        }
    }
    folded
}

impl Alike<'_> {
    fn numbers(&self) -> String {
        let first = self.first.group;
        match self.others.last() {
            Some(last) => format!("{first} to {}", last.group),
            None => first.to_string(),
        }
    }

    fn units(&self) -> String {
        let frozen = if self.first.requires_grad {
            ""
        } else {
            " (frozen)"
        };
        match self.others.last() {
            Some(last) => format!("{} to {}{frozen}", self.first.unit, last.unit),
            None => format!("{}{frozen}", self.first.unit),
        }
    }
}

pub(super) fn print(report: &Report, out: &mut Out) -> Result<(), Failure> {
    out.heading(format_args!(
        "{}: {} parameter groups over {} {}, gathered in {}",
        report.scenario,
        count(report.groups.len() as u64),
        count(report.shards.into()),
        if report.shards == 1 {
            "shard"
        } else {
            "shards"
        },
        report.compute
    ))?;
    let ParameterCount {
        total, trainable, ..
    } = report.parameters;
    if trainable < total {
        out.line(format_args!(
            "{} of {} parameters are trained ({:.3} %)",
            count(trainable),
            count(total),
            100.0 * trainable as f64 / total as f64
        ))?;
    }
    out.blank()?;
    let folded = folded(&report.groups);
    let mut table = Table::new([
        "groups",
        "units",
        "?layout",
        ">elements",
        "?>padded",
        "?>padding",
        "?>shard",
        ">gathered",
    ]);
    for group in &folded {
        let g = group.first;
        let padding = g.full_numel - g.payload_numel;
        table.row([
            group.numbers(),
            group.units(),
            match g.chunk_factor {
                Some(rows) => format!("{}, rows of {}", g.layout, count(rows)),
                None => g.layout.to_owned(),
            },
            count(g.payload_numel),
            count(g.full_numel),
            format!(
                "{:.3} %",
                100.0 * padding as f64 / g.full_numel.max(1) as f64
            ),
            count(g.shard_numel),
            Bytes(g.full_bytes).to_string(),
        ]);
    }
    out.text(table)?;
    if folded.iter().any(|g| !g.others.is_empty()) {
        out.paragraph(
            0,
            "Groups that are alike are listed once; the numbers apply to each of them.",
        )?;
    }
    for group in &folded {
        let g = group.first;
        out.blank()?;
        out.heading(match group.others.len() {
            0 => format!("group {}: {}", group.numbers(), group.units()),
            more => format!(
                "groups {}: {} ({} alike)",
                group.numbers(),
                group.units(),
                more + 1
            ),
        })?;
        let mut table = Table::new([
            "parameter",
            "shape",
            "?>offset",
            ">elements",
            ">held by ranks",
        ]);
        for p in &g.params {
            let shape: Vec<String> = p.shape.iter().map(|n| count(*n)).collect();
            table.row([
                if p.requires_grad || !g.requires_grad {
                    p.name.clone()
                } else {
                    format!("{} (frozen)", p.name)
                },
                shape.join(" x "),
                count(p.offset),
                count(p.numel),
                held(&p.per_rank),
            ]);
        }
        out.text(table)?;
    }
    Ok(())
}

/// Returns how many elements each rank holds, on lines such as `0: 4,096` and `1-3: 0`.
fn held(per_rank: &[(u32, u64)]) -> String {
    let mut first = 0;
    let mut lines = Vec::new();
    for (ranks, elements) in per_rank {
        let elements = count(*elements);
        lines.push(match ranks {
            1 => format!("{first}: {elements}"),
            n => format!("{first}-{}: {elements}", first + n - 1),
        });
        first += ranks;
    }
    lines.join("\n")
}

/// Returns whether groups differ only in their names.
fn alike(a: &GroupReport, b: &GroupReport) -> bool {
    a.full_numel == b.full_numel
        && a.requires_grad == b.requires_grad
        && a.params.len() == b.params.len()
        && a.params
            .iter()
            .zip(&b.params)
            .all(|(x, y)| x.shape == y.shape && x.offset == y.offset && x.per_rank == y.per_rank)
}
