//! How parameters lie in the buffers that are gathered and reduced.

use super::super::output::{Failure, Out};
use super::super::table::Table;
use serde::Serialize;
use shardlab_plan::program::UnitId;
use shardlab_plan::shard::{Group, Layout};
use shardlab_plan::units::Bytes;
use shardlab_plan::{Program, Scenario};

/// All parameter groups of a program.
#[derive(Serialize)]
pub(super) struct Report {
    scenario: String,
    program_digest: String,
    /// Element type of the gathered weights.
    compute: &'static str,
    shards: u32,
    groups: Vec<GroupReport>,
}

#[derive(Serialize)]
struct GroupReport {
    group: usize,
    unit: String,
    layout: &'static str,
    requires_grad: bool,
    /// Elements that a shard boundary never divides (flat layouts).
    #[serde(skip_serializing_if = "Option::is_none")]
    chunk_factor: Option<u64>,
    payload_numel: u64,
    full_numel: u64,
    shard_numel: u64,
    /// Bytes of the gathered weights, padding included.
    full_bytes: u64,
    params: Vec<ParamReport>,
}

#[derive(Serialize, PartialEq)]
struct ParamReport {
    name: String,
    shape: Vec<u64>,
    /// First element in the full buffer; per-parameter layouts: in the shard.
    offset: u64,
    numel: u64,
    requires_grad: bool,
    /// Elements of it that each rank of the shard axis holds, equal neighbours merged: `[ranks, elements]`.
    per_rank: Vec<(u32, u64)>,
}

pub(super) fn report(scenario: &Scenario, program: &Program, units: Option<&[UnitId]>) -> Report {
    let shown = |g: &&(usize, &Group)| units.is_none_or(|u| u.contains(&g.1.unit));
    let groups: Vec<(usize, &Group)> = program.groups.iter().enumerate().collect();
    Report {
        scenario: scenario.name.clone(),
        program_digest: program.digest(),
        compute: program.meta.compute.name(),
        shards: program.meta.dp_shard,
        groups: groups
            .iter()
            .filter(shown)
            .map(|&(i, g)| group_report(program, i, g))
            .collect(),
    }
}

fn group_report(program: &Program, index: usize, group: &Group) -> GroupReport {
    let layout = &group.layout;
    let (name, chunk_factor, shards) = match layout {
        Layout::Flat(l) => ("flat", Some(l.chunk_factor), l.shards),
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
        full_bytes: layout.full_numel() * program.meta.compute.size(),
        params: params.collect(),
    }
}

pub(super) fn print(report: &Report, out: &mut Out) -> Result<(), Failure> {
    out.line(format_args!(
        "{}: {} parameter groups over {} shards, gathered in {}",
        report.scenario,
        report.groups.len(),
        report.shards,
        report.compute
    ))?;
    out.blank()?;
    let mut table = Table::new([
        ">group",
        "unit",
        "layout",
        ">elements",
        ">padded",
        ">padding",
        ">shard",
        ">gathered",
    ]);
    for g in &report.groups {
        let padding = g.full_numel - g.payload_numel;
        table.row([
            g.group.to_string(),
            format!(
                "{}{}",
                g.unit,
                if g.requires_grad { "" } else { " (frozen)" }
            ),
            match g.chunk_factor {
                Some(rows) => format!("{}, rows of {rows}", g.layout),
                None => g.layout.to_owned(),
            },
            g.payload_numel.to_string(),
            g.full_numel.to_string(),
            format!(
                "{:.3} %",
                100.0 * padding as f64 / g.full_numel.max(1) as f64
            ),
            g.shard_numel.to_string(),
            Bytes(g.full_bytes).to_string(),
        ]);
    }
    out.text(table)?;
    let mut shown: Vec<(&GroupReport, Vec<&str>)> = Vec::new();
    for g in &report.groups {
        match shown.iter_mut().find(|(s, _)| alike(s, g)) {
            Some((_, twins)) => twins.push(&g.unit),
            None => shown.push((g, Vec::new())),
        }
    }
    for (g, twins) in shown {
        out.blank()?;
        out.heading(format_args!("group {} {}", g.group, g.unit))?;
        if let (Some(first), Some(last)) = (twins.first(), twins.last()) {
            out.line(format_args!(
                "laid out in the same way: {} units, {first} to {last}",
                twins.len()
            ))?;
        }
        let mut table = Table::new([
            "parameter",
            "shape",
            ">offset",
            ">elements",
            "held by ranks",
        ]);
        for p in &g.params {
            let shape: Vec<String> = p.shape.iter().map(u64::to_string).collect();
            table.row([
                if p.requires_grad || !g.requires_grad {
                    p.name.clone()
                } else {
                    format!("{} (frozen)", p.name)
                },
                shape.join(" x "),
                p.offset.to_string(),
                p.numel.to_string(),
                held(&p.per_rank),
            ]);
        }
        out.text(table)?;
    }
    Ok(())
}

/// `4 x 1024`, or `1 x 1024, 3 x 0`.
fn held(per_rank: &[(u32, u64)]) -> String {
    let parts: Vec<String> = per_rank
        .iter()
        .map(|(n, of)| format!("{n} x {of}"))
        .collect();
    parts.join(", ")
}

/// Equal but for names.
fn alike(a: &GroupReport, b: &GroupReport) -> bool {
    a.full_numel == b.full_numel
        && a.requires_grad == b.requires_grad
        && a.params.len() == b.params.len()
        && a.params
            .iter()
            .zip(&b.params)
            .all(|(x, y)| x.shape == y.shape && x.offset == y.offset && x.per_rank == y.per_rank)
}
