//! Predicts whether a scenario fits, and what takes up the memory of a GPU.

use super::predict::{shown_error, tone};
use super::{Ended, Reporter};
use crate::analysis::smallest_fit;
use crate::analysis::verdict::Verdict;
use crate::analysis::warnings;
use crate::dash::app::Tone;
use crate::dash::event::{News, Setup};
use crate::dash::tables::{Page, Table};
use crate::predict::{Fit, Prediction, Profiles, predict};
use shardlab_plan::units::Bytes;
use shardlab_sim::Options;
use std::sync::Arc;

/// Width of the longest bar.
const BAR: f64 = 30.0;

pub(super) fn fit(
    setup: &Setup,
    keys: Option<&Table>,
    profiles: &Profiles,
    reporter: &Reporter,
) -> Result<Ended, String> {
    let load = |more: &[String]| setup.load(more);
    let scenario = load(&[]).map_err(|e| shown_error(&e))?;
    let p = predict(&scenario, profiles, &Options::default()).map_err(|e| e.reason())?;
    let verdict = Verdict::of(&p);
    let tone = tone(&verdict);
    let mut tables = vec![
        sentence("Why", [verdict.why.clone()]),
        sentence("Next", [next(&p, profiles, &load)]),
    ];
    let warnings = warnings::located(&p, &setup.path, &setup.overrides);
    if !warnings.is_empty() {
        tables.push(sentence(
            "Warnings",
            warnings.iter().map(ToString::to_string),
        ));
    }
    tables.push(memory(&p));
    tables.extend(keys.cloned());
    let page = Page {
        title: setup.name(),
        verdict: Some((tone, verdict.line())),
        tables,
        losses: Vec::new(),
    };
    reporter.say(News::Fitted(setup.clone(), Arc::new(page)));
    Ok(Ended::Done)
}

/// Returns sentences below a heading.
fn sentence(title: &str, notes: impl IntoIterator<Item = String>) -> Table {
    Table {
        notes: notes.into_iter().collect(),
        ..Table::new(title, &[])
    }
}

/// Returns what to do next. For a scenario that does not fit, this is the smallest change that
/// makes it fit.
fn next(p: &Prediction, profiles: &Profiles, load: crate::analysis::whatif::Load<'_>) -> String {
    if !matches!(p.fit, Fit::Exceeds { .. }) {
        return "o searches for the best settings; i predicts what single changes would do"
            .to_owned();
    }
    let Some(search) = smallest_fit::search(p, profiles, load) else {
        return "o searches for settings that fit".to_owned();
    };
    if let Some(best) = search.best() {
        let change = best.change.overrides.join(" ");
        return format!("smallest change that fits: {change} (i applies it)");
    }
    match &search.more_gpus {
        Some(more) => format!(
            "no combination of up to three options fits on these GPUs; more GPUs do: {}",
            more.change.overrides.join(" ")
        ),
        None => "no combination of up to three options fits on these GPUs".to_owned(),
    }
}

/// Returns what takes up the device's memory at the peak, and what remains free.
fn memory(p: &Prediction) -> Table {
    let m = &p.run.memory;
    let device = m.capacity.unwrap_or(m.peak_device);
    let title = match m.capacity {
        Some(capacity) => format!(
            "Memory of a GPU at the peak: {} of {capacity}",
            m.peak_device
        ),
        None => format!("Memory of a GPU at the peak: {}", m.peak_device),
    };
    let mut table = Table::new(title, &["memory", ">bytes", ">of the GPU", ""]);
    let mut row = |tone, name: &str, bytes: Bytes| {
        let share = bytes.0 as f64 / device.0.max(1) as f64;
        let bar = "█".repeat((share * BAR).round().min(2.0 * BAR) as usize);
        let share = format!("{:.1} %", 100.0 * share);
        table.row(tone, [name.to_owned(), bytes.to_string(), share, bar]);
    };
    for (role, bytes) in &m.by_role {
        row(Tone::Plain, role.name(), *bytes);
    }
    let rest = |whole: Bytes, part: Bytes| Bytes(whole.0.saturating_sub(part.0));
    let cached = rest(m.peak_reserved, m.peak_allocated);
    row(Tone::Plain, "reserved, not in use", cached);
    let context = rest(m.peak_device, m.peak_reserved);
    row(Tone::Plain, "context, communicators", context);
    match p.free_bytes() {
        Some(free) if free < 0 => row(Tone::Bad, "missing", Bytes(free.unsigned_abs())),
        Some(free) => row(Tone::Good, "free", Bytes(free.unsigned_abs())),
        None => {}
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dash::event::{Event, Message};
    use std::sync::mpsc::channel;

    fn page(name: &str, set: &[&str], keys: Option<&Table>) -> Page {
        let (events, inbox) = channel();
        let setup = Setup {
            path: name.into(),
            overrides: set.iter().map(|s| (*s).to_owned()).collect(),
        };
        let reporter = Reporter { id: 1, events };
        let ended = fit(&setup, keys, &Profiles::default(), &reporter).unwrap();
        assert!(matches!(ended, Ended::Done));
        let last = inbox.try_iter().last().unwrap();
        let Event::Message(Message::Job(1, News::Fitted(of, page))) = last else {
            panic!("another message")
        };
        assert_eq!(of, setup);
        (*page).clone()
    }

    #[test]
    fn a_small_scenario_fits_and_shows_its_keys() {
        let keys = Table::new("Keys of job.yaml", &["key"]);
        let page = page("small-fsdp2", &["mesh.hardware=h100-80"], Some(&keys));
        let (tone, verdict) = page.verdict.unwrap();
        assert!(
            tone == Tone::Good && verdict.starts_with("fits"),
            "{verdict}"
        );
        assert_eq!(page.tables.last().unwrap().title, "Keys of job.yaml");
        let memory = &page.tables[page.tables.len() - 2];
        assert!(memory.rows.iter().any(|r| r.cells[0] == "free"));
    }

    #[test]
    fn what_does_not_fit_says_what_is_missing_and_what_helps() {
        let set = ["mesh.hardware=h100-80", "train.recompute=none"];
        let page = page("llama3-8b-4xh200", &set, None);
        let (tone, verdict) = page.verdict.unwrap();
        assert!(
            tone == Tone::Bad && verdict.starts_with("does not fit"),
            "{verdict}"
        );
        let next = page.tables.iter().find(|t| t.title == "Next").unwrap();
        let help = &next.notes[0];
        assert!(help.starts_with("smallest change that fits: "), "{help}");
        let memory = page.tables.last().unwrap();
        assert_eq!(memory.rows.last().unwrap().cells[0], "missing");
    }
}
