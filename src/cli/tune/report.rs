//! The answer as a report: the changes and their reasons, and the front of throughput and reserved
//! memory.

use super::super::report::{Form, made};
use super::{Job, print};
use crate::analysis::verdict::Verdict;
use crate::predict::Prediction;
use crate::tune::{Answer, Proposal, words};
use shardlab_reports::plots::{Spot, pareto};
use shardlab_reports::report::{Block, Report, Section, Table, html, markdown};

/// Returns the report on an answer.
pub(super) fn report(
    job: &Job,
    answer: &Answer,
    best: &Prediction,
    verdict: &Verdict,
    next: &str,
) -> Report {
    let name = &best.scenario.name;
    let mut sections = vec![Section {
        id: "answer",
        title: "Answer".to_owned(),
        blocks: summary(answer, best, verdict, next),
    }];
    if !answer.reasons.is_empty() {
        sections.push(Section {
            id: "changes",
            title: "Changes".to_owned(),
            blocks: vec![table(
                print::CHANGES,
                &words::CHANGED,
                words::changed(answer),
            )],
        });
    }
    if answer.found {
        sections.push(front(answer, best));
    }
    let about = best.run.basis.as_ref().map(|basis| basis.words());
    let fixed = job.fixed(answer).into_iter();
    let fixed = fixed.map(|set| format!("Fixed: {set}"));
    let gpus = job.fewest.iter();
    let gpus = gpus.map(|fewest| format!("GPUs: {}", print::gpus(fewest)));
    Report {
        title: format!("Best settings of {name}"),
        about: about
            .into_iter()
            .chain(fixed)
            .chain(gpus)
            .chain([made()])
            .collect(),
        sections,
    }
}

/// Returns the report's text. Markdown has no drawings, but describes what they show.
pub(super) fn text(report: &Report, form: Form) -> String {
    match form {
        Form::Html => html(report),
        Form::Markdown => markdown(report, |_| None),
    }
}

fn summary(answer: &Answer, best: &Prediction, verdict: &Verdict, next: &str) -> Vec<Block> {
    let lines = [verdict.line(), verdict.why.clone(), format!("Next: {next}")];
    let head = print::comparison_head(answer);
    let head = head.each_ref().map(String::as_str);
    let compared = table("Today and best", &head, words::compared(answer, best));
    let conclusions = words::conclusions(answer);
    let lines = lines.into_iter().map(Block::Text);
    let conclusions = conclusions.into_iter().map(Block::Text);
    lines.chain([compared]).chain(conclusions).collect()
}

fn front(answer: &Answer, best: &Prediction) -> Section {
    let unit = best.scenario.model.family.counted_in().rate();
    let capacity = best.run.memory.capacity.map(|c| c.gib());
    let plot = pareto(print::FRONT, unit, &spots(answer), capacity);
    let rows = answer.front.iter().map(print::front_row).collect();
    Section {
        id: "front",
        title: "Throughput and memory".to_owned(),
        blocks: vec![
            Block::Plot(plot),
            table("The front", &print::FRONT_HEAD, rows),
        ],
    }
}

/// Returns the points of the front, and the settings that the answer lists.
fn spots(answer: &Answer) -> Vec<Spot> {
    let named = [
        ("today", Some(&answer.today)),
        ("best", Some(&answer.best)),
        ("simplest", answer.simpler.as_ref()),
    ];
    let named = named.into_iter().filter_map(|(n, p)| Some((n, p?)));
    let named: Vec<(&str, &Proposal)> = named.collect();
    let spot = |label: String, of: &Proposal, on_front: bool| Spot {
        label,
        reserved: of.score.effect.peak_reserved.gib(),
        throughput: of.score.effect.tokens_per_s,
        fits: of.score.fits(),
        on_front,
    };
    let mut spots: Vec<Spot> = Vec::new();
    for point in &answer.front {
        let same = |(_, p): &&(&str, &Proposal)| p.set == point.set;
        let label = named.iter().find(same).map(|(name, _)| (*name).to_owned());
        spots.push(spot(
            label.unwrap_or_else(|| words::settings(point)),
            point,
            true,
        ));
    }
    for (name, point) in &named {
        let known = answer.front.iter().any(|p| p.set == point.set);
        // The best settings may be the current ones.
        if !known && !spots.iter().any(|s| s.label == *name) {
            spots.push(spot((*name).to_owned(), point, false));
        }
    }
    spots
}

fn table<const N: usize>(caption: &str, head: &[&str; N], rows: Vec<[String; N]>) -> Block {
    Block::Table(Table {
        caption: caption.to_owned(),
        head: head.iter().map(|h| (*h).to_owned()).collect(),
        rows: rows.into_iter().map(Vec::from).collect(),
    })
}
