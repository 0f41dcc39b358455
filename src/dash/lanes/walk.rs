//! Searches in lanes.

use super::bins::Window;
use super::{Gap, Lanes};
use std::collections::BTreeSet;

impl Lanes {
    /// Returns the units with their phases in order of time, for completing jumps: `layers.3
    /// backward`.
    #[must_use]
    pub(crate) fn unit_names(&self) -> Vec<String> {
        let mut seen = BTreeSet::new();
        let mut all = Vec::new();
        for s in &self.segments {
            let name = format!("{} {}", self.view.unit(s.unit), s.phase.name());
            if seen.insert(name.clone()) {
                all.push(name);
            }
        }
        all
    }

    /// Returns the time of a unit on the compute stream and its first span. The unit is given as
    /// `UNIT` or `UNIT PHASE`; a prefix of the phase is enough.
    #[must_use]
    pub(crate) fn find_unit(&self, text: &str) -> Option<(Window, u32)> {
        let mut words = text.split_whitespace();
        let unit = words.next()?;
        let phase = words.next().unwrap_or("");
        let (window, first) = self.window_where(|i| {
            self.view.unit(i.unit) == unit && i.phase.name().starts_with(phase)
        })?;
        Some((window, first))
    }

    /// Returns the time of the unit, phase and micro-batch that a span belongs to.
    #[must_use]
    pub fn unit_of(&self, span: u32) -> Option<Window> {
        let own = *self.instr(span)?;
        self.window_where(|i| {
            (i.unit, i.phase, i.micro_batch) == (own.unit, own.phase, own.micro_batch)
        })
        .or_else(|| {
            let item = self.item(span)?;
            let window = Window {
                from: item.start,
                to: item.end,
            };
            Some((window, span))
        })
        .map(|(window, _)| window)
    }

    /// Returns the time from the first to the last span of the compute stream that satisfies a
    /// condition, and the first such span.
    fn window_where(
        &self,
        holds: impl Fn(&shardlab_reports::view::InstrView) -> bool,
    ) -> Option<(Window, u32)> {
        let items = &self.lanes.first()?.items;
        let mut of = items
            .iter()
            .filter(|i| self.instr(i.span).is_some_and(&holds));
        let first = of.next()?;
        let to = of.map(|i| i.end).fold(first.end, u64::max);
        let window = Window {
            from: first.start,
            to,
        };
        Some((window, first.span))
    }

    /// Returns the span of an instruction: the one with this number, or the next one after `after`
    /// whose name or unit contains the text.
    #[must_use]
    pub(crate) fn find_instr(&self, text: &str, after: Option<u32>) -> Option<u32> {
        let spans = &self.view.run.spans;
        let text = text.trim();
        if let Ok(number) = text.trim_start_matches('#').parse::<u32>() {
            return spans
                .iter()
                .position(|s| s.instr.0 == number)
                .map(|i| i as u32);
        }
        if text.is_empty() {
            return None;
        }
        let words: Vec<&str> = text.split_whitespace().collect();
        let fits = |i: &u32| {
            let Some(instr) = self.instr(*i) else {
                return false;
            };
            let own = [
                self.view.name_of(instr),
                self.view.unit(instr.unit),
                instr.phase.name(),
            ];
            words.iter().all(|w| own.iter().any(|o| o.contains(w)))
        };
        let all = spans.len() as u32;
        let from = after.map_or(0, |a| a + 1);
        (from..all).chain(0..from.min(all)).find(fits)
    }

    /// Returns the next gap of at least `least` picoseconds after a time, or the previous one.
    /// Wraps around at the ends.
    #[must_use]
    pub fn gap(&self, time: u64, forward: bool, least: u64) -> Option<&Gap> {
        let mut worth = self.gaps.iter().filter(|g| g.end - g.start >= least);
        if forward {
            let mut again = worth.clone();
            worth.find(|g| g.start > time).or_else(|| again.next())
        } else {
            let mut before = worth.clone().filter(|g| g.start < time);
            before.next_back().or_else(|| worth.next_back())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dash::testing::view;

    fn lanes() -> Lanes {
        Lanes::new(view("llama3-8b-4xh200", &[]))
    }

    #[test]
    fn units_are_found_with_their_phase() {
        let lanes = lanes();
        let names = lanes.unit_names();
        assert!(names.contains(&"layers.3 forward".to_owned()), "{names:?}");
        let (forward, _) = lanes.find_unit("layers.3 forward").unwrap();
        let (backward, first) = lanes.find_unit("layers.3 back").unwrap();
        assert!(forward.to <= backward.from);
        assert_eq!(lanes.unit_of(first), Some(backward));
        let (both, _) = lanes.find_unit("layers.3").unwrap();
        assert!(both.from == forward.from && both.to >= backward.to);
        assert_eq!(lanes.find_unit("layers.99"), None);
        assert_eq!(lanes.find_unit(""), None);
    }

    #[test]
    fn instructions_are_found_by_number_and_by_words_going_round() {
        let lanes = lanes();
        let second = lanes.view.run.spans[1].instr.0;
        assert_eq!(lanes.find_instr(&second.to_string(), None), Some(1));
        assert_eq!(lanes.find_instr(&format!("#{second}"), None), Some(1));
        let first = lanes
            .find_instr("all_gather layers.5 backward", None)
            .unwrap();
        let label = lanes.label(first);
        assert_eq!(label, "all_gather layers.5");
        assert_eq!(
            lanes.find_instr("all_gather layers.5 backward", Some(first)),
            Some(first)
        );
        assert_eq!(lanes.find_instr("no_such_kernel", None), None);
        assert_eq!(lanes.find_instr("4000000000", None), None);
    }

    #[test]
    fn gaps_are_walked_in_both_directions_and_round() {
        let lanes = lanes();
        let first = lanes.gap(0, true, 0).unwrap().start;
        let last = lanes.gap(0, false, 0).unwrap().start;
        assert!(last >= first);
        assert_eq!(
            lanes.gap(last, true, 0).map(|g| g.start),
            lanes.gaps.first().map(|g| g.start)
        );
        assert_eq!(lanes.gap(0, true, u64::MAX), None);
    }
}
