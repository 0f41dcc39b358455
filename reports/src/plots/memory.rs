//! Memory over a step, stacked by role, with the device's limit.

use super::draw::{self, BAD, FAINT, GRID, series, short, text};
use super::{Plot, SERIES};
use crate::view::RunView;
use plotters::prelude::*;
use shardlab_plan::ir::Role;
use shardlab_plan::units::Bytes;
use std::collections::BTreeMap;

/// Maximum number of points of the curve. Each is the maximum of its interval.
const POINTS: usize = 500;
/// Share of the step above which a pause between two samples is drawn as a level line.
const LEVEL: f64 = 0.004;
const GIB: f64 = (1u64 << 30) as f64;
const MIB: f64 = (1u64 << 20) as f64;

/// Allocated bytes at a time, by role.
type Sample = (f64, BTreeMap<&'static str, i64>);

/// Draws the memory of a run's recorded step; `None` without samples.
#[must_use]
pub fn memory(name: &str, title: &str, view: &RunView) -> Option<Plot> {
    let samples = levels(thinned(samples(view)?));
    let mut peaks: BTreeMap<&str, i64> = BTreeMap::new();
    for (_, roles) in &samples {
        for (role, bytes) in roles {
            let peak = peaks.entry(role).or_default();
            *peak = (*peak).max(*bytes);
        }
    }
    let mut roles: Vec<(&str, i64)> = peaks.into_iter().filter(|(_, b)| *b > 0).collect();
    roles.sort_by_key(|(role, b)| (std::cmp::Reverse(*b), *role));
    // The last colour stands for all remaining roles.
    let own = if roles.len() > SERIES {
        SERIES - 1
    } else {
        roles.len()
    };
    let mut layers: Vec<(String, Vec<f64>)> = roles[..own]
        .iter()
        .map(|(role, _)| {
            let values = samples
                .iter()
                .map(|(_, r)| r.get(role).copied().unwrap_or(0).max(0) as f64);
            ((*role).to_owned(), values.collect())
        })
        .collect();
    if roles.len() > own {
        let rest: Vec<&str> = roles[own..].iter().map(|(r, _)| *r).collect();
        let values = samples.iter().map(|(_, r)| {
            rest.iter()
                .map(|k| r.get(k).copied().unwrap_or(0).max(0) as f64)
                .sum()
        });
        layers.push(("others".to_owned(), values.collect()));
    }
    let m = &view.run.memory;
    let peak = m.peak_device.0.max(m.peak_allocated.0) as f64;
    // A limit far above the curve would flatten it, so it is only mentioned in words.
    let limit = m.capacity.map(|c| c.0 as f64);
    let drawn = limit.filter(|l| *l <= 1.6 * peak);
    let (unit, scale) = if peak >= GIB {
        ("GiB", GIB)
    } else {
        ("MiB", MIB)
    };
    let top = 1.05 * drawn.unwrap_or(0.0).max(peak) / scale;
    let end = samples.last().map_or(1.0, |(t, _)| *t).max(1e-9);
    let limit_words = match m.capacity {
        Some(limit) => format!("; the device has {limit}"),
        None => String::new(),
    };
    let description = format!(
        "peak of {} allocated, {} of the device{limit_words}; largest at any time: {}",
        m.peak_allocated,
        m.peak_device,
        roles
            .iter()
            .take(3)
            .map(|(r, b)| format!("{r} {}", Bytes(b.unsigned_abs())))
            .collect::<Vec<_>>()
            .join(", ")
    );
    let legend = layers
        .iter()
        .enumerate()
        .map(|(i, (n, _))| (i, n.clone()))
        .collect();
    let plot = draw::plot(name, title, description, 600, legend, |area| {
        let mut chart = ChartBuilder::on(area)
            .margin(16)
            .set_label_area_size(LabelAreaPosition::Bottom, 80)
            .set_label_area_size(LabelAreaPosition::Left, 120)
            .build_cartesian_2d(0.0..end, 0.0..top)?;
        chart
            .configure_mesh()
            .x_desc("milliseconds of host time since the first allocation")
            .y_desc(unit)
            .x_label_formatter(&|v| short(*v))
            .y_label_formatter(&|v| short(*v))
            .label_style(text(24, &FAINT))
            .axis_desc_style(text(24, &FAINT))
            .axis_style(GRID)
            .bold_line_style(GRID)
            .light_line_style(TRANSPARENT)
            .draw()?;
        let mut below = vec![0.0; samples.len()];
        for (i, (_, values)) in layers.iter().enumerate() {
            let above: Vec<f64> = below
                .iter()
                .zip(values)
                .map(|(a, b)| a + b / scale)
                .collect();
            let at = |v: &[f64]| -> Vec<(f64, f64)> {
                samples.iter().zip(v).map(|((t, _), y)| (*t, *y)).collect()
            };
            let outline: Vec<(f64, f64)> = at(&above)
                .into_iter()
                .chain(at(&below).into_iter().rev())
                .collect();
            chart.draw_series([Polygon::new(outline, series(i).filled())])?;
            below = above;
        }
        if let Some(limit) = drawn {
            let y = limit / scale;
            chart.draw_series(LineSeries::new([(0.0, y), (end, y)], BAD.stroke_width(4)))?;
            chart.draw_series([Text::new(
                "device limit",
                (0.01 * end, 0.985 * y),
                text(24, &BAD),
            )])?;
        }
        Ok(())
    });
    Some(plot)
}

/// Returns the composition after every allocation and free of the recorded step.
///
/// A sample contains the total and the buffer that was allocated or freed. The composition is known
/// only at the peak; elsewhere it follows from the changes. If the peak is in another step,
/// everything present at the start counts as resident.
fn samples(view: &RunView) -> Option<Vec<Sample>> {
    let run = &view.run;
    let timeline = &run.memory.timeline;
    let first = timeline.first()?;
    // The host runs ahead of the device: its step begins with its first allocation.
    let start = first.time.0;
    let role = |i: usize| {
        let instr = view.instr(timeline[i].instr);
        instr.and_then(|i| i.role).map_or("others", Role::name)
    };
    let mut deltas: Vec<i64> = timeline
        .windows(2)
        .map(|w| w[1].allocated.0 as i64 - w[0].allocated.0 as i64)
        .collect();
    deltas.insert(0, 0);
    let known = timeline
        .iter()
        .position(|s| s.instr == run.memory.at.instr && s.allocated == run.memory.peak_allocated);
    let mut now: BTreeMap<&'static str, i64> = match known {
        Some(peak) => {
            let mut roles: BTreeMap<&'static str, i64> = run
                .memory
                .by_role
                .iter()
                .map(|(r, b)| (r.name(), b.0 as i64))
                .collect();
            for i in (1..=peak).rev() {
                *roles.entry(role(i)).or_default() -= deltas[i];
            }
            roles
        }
        None => BTreeMap::from([("at rest", first.allocated.0 as i64)]),
    };
    let mut out = Vec::with_capacity(timeline.len());
    for (i, sample) in timeline.iter().enumerate() {
        *now.entry(role(i)).or_default() += deltas[i];
        let ms = sample.time.0.saturating_sub(start) as f64 / 1e9;
        out.push((ms, now.clone()));
    }
    Some(out)
}

/// Returns the maximum sample of each interval of the step, from the start of the first to the end
/// of the last.
fn thinned(samples: Vec<Sample>) -> Vec<Sample> {
    if samples.len() <= POINTS {
        return samples;
    }
    let size = samples.len().div_ceil(POINTS - 2);
    let total = |s: &Sample| s.1.values().sum::<i64>();
    let highest = samples
        .chunks(size)
        .filter_map(|part| part.iter().max_by_key(|s| total(s)).cloned());
    let mut out: Vec<Sample> = samples.first().cloned().into_iter().collect();
    out.extend(highest.filter(|s| s.0 > samples[0].0));
    out.extend(
        samples
            .last()
            .filter(|s| out.last() != Some(*s))
            .cloned()
            .into_iter()
            .collect::<Vec<_>>(),
    );
    out
}

/// Draws long pauses as level lines instead of slopes, since allocated bytes stay constant until
/// the next sample.
fn levels(samples: Vec<Sample>) -> Vec<Sample> {
    let end = samples.last().map_or(0.0, |s| s.0);
    let mut out: Vec<Sample> = Vec::with_capacity(samples.len());
    for sample in samples {
        let pause = out
            .last()
            .filter(|before| sample.0 - before.0 > end * LEVEL)
            .map(|before| (sample.0, before.1.clone()));
        out.extend(pause);
        out.push(sample);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn layers_add_up_to_what_is_allocated() {
        let view = testing::view(400);
        let all = samples(&view).unwrap();
        for (sample, (_, roles)) in view.run.memory.timeline.iter().zip(&all) {
            assert_eq!(roles.values().sum::<i64>(), sample.allocated.0 as i64);
        }
        let plot = memory("m", "Memory", &view).unwrap();
        assert!(plot.description.starts_with("peak of "));
        let mut none = view.clone();
        none.run.memory.timeline.clear();
        assert_eq!(memory("m", "Memory", &none), None);
    }

    #[test]
    fn pauses_are_level() {
        let at = |ms: f64, bytes: i64| (ms, BTreeMap::from([("a", bytes)]));
        let drawn = levels(vec![at(0.0, 1), at(50.0, 2), at(50.1, 3), at(100.0, 4)]);
        let expected = [
            at(0.0, 1),
            at(50.0, 1),
            at(50.0, 2),
            at(50.1, 3),
            at(100.0, 3),
            at(100.0, 4),
        ];
        assert_eq!(drawn, expected);
    }

    #[test]
    fn thinning_keeps_the_peak() {
        let many: Vec<Sample> = (0..10_000)
            .map(|i| {
                (
                    f64::from(i),
                    BTreeMap::from([("a", i64::from((i * 7919) % 9973))]),
                )
            })
            .collect();
        let peak = many.iter().map(|s| s.1["a"]).max();
        let ends = [many[0].clone(), many[9999].clone()];
        let few = thinned(many);
        assert!(few.len() <= POINTS);
        assert_eq!(few.iter().map(|s| s.1["a"]).max(), peak);
        assert_eq!([few[0].clone(), few[few.len() - 1].clone()], ends);
        assert!(few.windows(2).all(|w| w[0].0 < w[1].0));
    }
}
