//! Searches for the best settings of a scenario.

use super::predict::shown_error;
use super::{Ended, Reporter, Stop};
use crate::analysis::verdict::Verdict;
use crate::dash::app::Tone;
use crate::dash::event::{News, Setup};
use crate::dash::tables::Table;
use crate::dash::whatif::{Explained, Group, Proposal};
use crate::predict::{Prediction, Profiles, predict};
use crate::tune::{self, Answer, Goal, Limits, Request, Score, Watch, words};
use shardlab_sim::Options;
use std::sync::Arc;

/// Reports the best settings so far.
struct Follow<'a> {
    reporter: &'a Reporter,
    stop: &'a Stop,
}

impl Watch for Follow<'_> {
    fn stopped(&self) -> bool {
        self.stop.asked()
    }

    fn best(&self, evaluated: usize, score: &Score, fits: bool) {
        let effect = &score.effect;
        let best = match fits {
            true => format!("{:.1} ms, {}", effect.step_ms, effect.peak_reserved),
            false => "none fits yet".to_owned(),
        };
        let text = format!("{evaluated} predicted, best {best}");
        self.reporter.say(News::Searched(text));
    }
}

/// Reports the best settings. If the search ends early, these are the best ones so far.
pub(super) fn tune(
    setup: &Setup,
    profiles: &Profiles,
    reporter: &Reporter,
    stop: &Stop,
) -> Result<Ended, String> {
    let load = |more: &[String]| setup.load(more);
    load(&[]).map_err(|e| shown_error(&e))?;
    let request = Request {
        load: &load,
        profiles,
        goal: Goal::Throughput,
        limits: Limits::default(),
        kept: &[],
        free: &[],
        seed: 0,
    };
    let answer = tune::tune(&request, &Follow { reporter, stop }).map_err(|e| e.reason())?;
    if stop.leaving() {
        return Ok(Ended::Cancelled);
    }
    let best = load(&answer.best.set).map_err(|e| shown_error(&e))?;
    let best = predict(&best, profiles, &Options::default()).map_err(|e| e.reason())?;
    reporter.say(News::Explained(Arc::new(found(setup, &answer, &best))));
    Ok(if answer.interrupted {
        Ended::Cancelled
    } else {
        Ended::Done
    })
}

fn found(setup: &Setup, answer: &Answer, best: &Prediction) -> Explained {
    let verdict = Verdict::of(best);
    let tone = if answer.found { Tone::Good } else { Tone::Bad };
    Explained {
        setup: setup.clone(),
        verdict: (tone, format!("{}: {}", words::name(answer), verdict.line())),
        why: verdict.why,
        warnings: Vec::new(),
        base: answer.today.score.effect.clone(),
        basis: verdict.basis,
        proposals: proposals(answer),
        tables: tables(answer, best),
    }
}

/// Returns the best settings, the simplest ones, and the rest of the front.
fn proposals(answer: &Answer) -> Vec<Proposal> {
    let one = |group, of: &tune::Proposal| Proposal {
        group,
        label: words::settings(of),
        overrides: of.set.clone(),
        outcome: Ok(of.score.effect.clone()),
    };
    let mut all = Vec::new();
    if !answer.best.set.is_empty() {
        all.push(one(Group::Best, &answer.best));
    }
    all.extend(answer.simpler.as_ref().map(|s| one(Group::Simplest, s)));
    // The current settings are the first row of the table.
    let listed: Vec<Vec<String>> = all.iter().map(|p| p.overrides.clone()).collect();
    let is_new = |p: &&tune::Proposal| !p.set.is_empty() && !listed.contains(&p.set);
    let front = answer.front.iter().filter(is_new);
    all.extend(front.map(|p| one(Group::Front, p)));
    all
}

fn tables(answer: &Answer, best: &Prediction) -> Vec<Table> {
    let mut changes = Table::new(
        "Changes, and what undoing each one alone would cost",
        &words::CHANGED,
    );
    for row in words::changed(answer) {
        changes.row(Tone::Plain, row);
    }
    let title = format!(">{}", words::name(answer));
    let head = ["", ">today", &title, ">difference"];
    let mut compared = Table::new("Today and best", &head);
    for row in words::compared(answer, best) {
        compared.row(Tone::Plain, row);
    }
    compared.notes = words::conclusions(answer);
    vec![changes, compared]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dash::event::{Event, Message};
    use std::sync::mpsc::channel;

    fn run(stop: &Stop) -> (Ended, Vec<News>) {
        let (events, inbox) = channel();
        // A model of one layer on one GPU has few settings.
        let setup = Setup {
            path: "toy-linear".into(),
            overrides: Vec::new(),
        };
        let reporter = Reporter { id: 1, events };
        let ended = tune(&setup, &Profiles::default(), &reporter, stop).unwrap();
        let news = inbox.try_iter().map(|event| match event {
            Event::Message(Message::Job(1, news)) => news,
            other => panic!("{other:?}"),
        });
        (ended, news.collect())
    }

    #[test]
    fn the_best_settings_come_first_and_are_no_slower() {
        let (ended, news) = run(&Stop::default());
        assert!(matches!(ended, Ended::Done));
        assert!(matches!(news[0], News::Searched(_)), "{news:?}");
        let Some(News::Explained(found)) = news.last() else {
            panic!("{news:?}")
        };
        let (tone, verdict) = &found.verdict;
        assert!(
            *tone == Tone::Good && verdict.starts_with("best: fits"),
            "{verdict}"
        );
        let groups: Vec<Group> = found.proposals.iter().map(|p| p.group).collect();
        assert!(groups.is_sorted(), "{groups:?}");
        if let Some(best) = found.proposals.iter().find(|p| p.group == Group::Best) {
            let step = best.outcome.as_ref().unwrap().step_ms;
            assert!(step <= found.base.step_ms);
        }
        assert_eq!(found.tables[1].rows.len(), 6);
    }

    #[test]
    fn a_search_that_is_stopped_has_the_best_so_far() {
        let stop = Stop::default();
        stop.ask();
        let (ended, news) = run(&stop);
        assert!(matches!(ended, Ended::Cancelled));
        assert!(matches!(news.last(), Some(News::Explained(_))), "{news:?}");
    }
}
