//! Predicts the effects of changes to a scenario, and where its time and memory go.

mod tables;

use super::predict::{shown_error, tone};
use super::{Ended, Reporter, Stop};
use crate::analysis::smallest_fit::{self, Search};
use crate::analysis::verdict::Verdict;
use crate::analysis::whatif::{Effect, WhatIf, improvements, is_settable, try_all};
use crate::analysis::{compile, slower, warnings};
use crate::dash::event::{News, Setup};
use crate::dash::whatif::{Explained, Group, Proposal};
use crate::predict::{Prediction, Profiles, predict};
use shardlab_plan::config::Fsdp;
use shardlab_sim::Options;
use std::sync::Arc;

/// Reports the changes as soon as they are predicted, and then the tables that take longer.
pub(super) fn explain(
    setup: &Setup,
    profiles: &Profiles,
    reporter: &Reporter,
    stop: &Stop,
) -> Result<Ended, String> {
    let load = |more: &[String]| setup.load(more);
    let base = load(&[]).map_err(|e| shown_error(&e))?;
    let p = predict(&base, profiles, &Options::default()).map_err(|e| e.reason())?;
    let search = smallest_fit::search(&p, profiles, &load);
    if stop.asked() {
        return Ok(Ended::Cancelled);
    }
    let tried = try_all(&p, profiles, &load);
    if stop.asked() {
        return Ok(Ended::Cancelled);
    }
    let mut found = found(setup, &p, search.as_ref(), &tried);
    reporter.say(News::Explained(Arc::new(found.clone())));
    let modes = compile::modes(&p, profiles, &|mode: &str| load(&[mode.to_owned()]));
    if stop.asked() {
        return Ok(Ended::Cancelled);
    }
    found.tables.extend(tables::modes(&p, &modes));
    found.tables.push(tables::slower(&p, &slower::parts(&p)));
    reporter.say(News::Explained(Arc::new(found)));
    Ok(Ended::Done)
}

fn found(setup: &Setup, p: &Prediction, search: Option<&Search>, tried: &[WhatIf]) -> Explained {
    let verdict = Verdict::of(p);
    let base = Effect::of(p);
    let tone = tone(&verdict);
    let warnings = warnings::located(p, &setup.path, &setup.overrides);
    Explained {
        setup: setup.clone(),
        verdict: (tone, verdict.line()),
        why: verdict.why,
        warnings: warnings.iter().map(ToString::to_string).collect(),
        proposals: proposals(&base, &p.scenario.fsdp, search, tried),
        base,
        basis: verdict.basis,
        tables: tables::of(p),
    }
}

/// Sorts changes into groups, best first within each.
fn proposals(
    base: &Effect,
    fsdp: &Fsdp,
    search: Option<&Search>,
    tried: &[WhatIf],
) -> Vec<Proposal> {
    let solutions = search.into_iter().flat_map(|s| {
        let found = s.solutions.iter().chain(&s.narrow).chain(&s.more_gpus);
        found.map(|s| Proposal {
            group: Group::Fits,
            label: s.change.label.clone(),
            overrides: s.change.overrides.clone(),
            outcome: Ok(s.effect.clone()),
        })
    });
    let helping = improvements(base, tried, fsdp);
    let helpful = helping.iter().map(|(w, effect)| {
        let group = match (w.change.keeps_training(), effect.is_faster_than(base)) {
            (false, _) => Group::OtherTraining,
            (true, true) => Group::Faster,
            (true, false) => Group::Smaller,
        };
        proposal(w, group)
    });
    let helps = |w: &&WhatIf| helping.iter().any(|(other, _)| std::ptr::eq(*other, *w));
    let rest = tried.iter().filter(|w| !helps(w)).map(|w| {
        let settable = |set: &String| is_settable(fsdp, set);
        let group = match &w.effect {
            Err(_) => Group::Impossible,
            Ok(effect) if !effect.differs(base) => Group::Same,
            Ok(_) if !w.change.overrides.iter().all(settable) => Group::OtherEngine,
            Ok(_) => Group::NoGain,
        };
        proposal(w, group)
    });
    let mut rest: Vec<Proposal> = rest.collect();
    let speed = |p: &Proposal| p.outcome.as_ref().map_or(0.0, |e| e.tokens_per_s);
    rest.sort_by(|a, b| speed(b).total_cmp(&speed(a)));
    let mut all: Vec<Proposal> = solutions.chain(helpful).chain(rest).collect();
    // A stable sort keeps the order within groups.
    all.sort_by_key(|p| p.group);
    all
}

fn proposal(tried: &WhatIf, group: Group) -> Proposal {
    Proposal {
        group,
        label: tried.change.label.clone(),
        overrides: tried.change.overrides.clone(),
        outcome: tried.effect.as_ref().cloned().map_err(|e| e.reason()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dash::app::Tone;
    use crate::dash::event::{Event, Message};
    use shardlab_plan::scenario;
    use std::sync::mpsc::channel;

    fn explained(name: &str, set: &[&str]) -> Explained {
        let (events, inbox) = channel();
        let setup = Setup {
            path: name.into(),
            overrides: set.iter().map(|s| (*s).to_owned()).collect(),
        };
        let reporter = Reporter { id: 1, events };
        let profiles = Profiles::default();
        let ended = explain(&setup, &profiles, &reporter, &Stop::default()).unwrap();
        assert!(matches!(ended, Ended::Done));
        let last = inbox.try_iter().last().unwrap();
        let Event::Message(Message::Job(1, News::Explained(found))) = last else {
            panic!("another message")
        };
        (*found).clone()
    }

    #[test]
    fn changes_are_grouped_and_have_effects() {
        let found = explained("small-native", &["fsdp.prefetch_forward=0"]);
        let groups: Vec<Group> = found.proposals.iter().map(|p| p.group).collect();
        assert!(groups.is_sorted(), "{groups:?}");
        for p in &found.proposals {
            assert_eq!(p.group == Group::Impossible, p.outcome.is_err(), "{p:?}");
            if let (Group::Faster, Ok(effect)) = (p.group, &p.outcome) {
                assert!(effect.is_faster_than(&found.base), "{p:?}");
            }
        }
        assert!(groups.contains(&Group::Impossible) && groups.contains(&Group::Same));
        let titles: Vec<&str> = found.tables.iter().map(|t| t.title.as_str()).collect();
        for words in [
            "Exposed time",
            "Memory at the peak",
            "Critical path",
            "Compile modes",
            "If one component were slower",
        ] {
            assert!(
                titles.iter().any(|t| t.starts_with(words)),
                "{words}: {titles:?}"
            );
        }
        assert!(found.tables.iter().all(|t| !t.rows.is_empty()));
    }

    /// A scenario that does not fit gets the changes that make it fit. Predictions confirm them.
    #[test]
    fn what_does_not_fit_gets_solutions() {
        let set = ["train.micro_batch=8", "train.recompute=none"];
        let found = explained("llama3-8b-8xh100", &set);
        assert_eq!(found.verdict.0, Tone::Bad);
        let first = &found.proposals[0];
        assert_eq!(first.group, Group::Fits);
        let all: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
        let all = [&all[..], &first.overrides].concat();
        let scenario = scenario::load("llama3-8b-8xh100".as_ref(), &all).unwrap();
        let p = predict(&scenario, &Profiles::default(), &Options::default()).unwrap();
        assert!(p.fit.is_ok(), "{:?}", first.overrides);
    }
}
