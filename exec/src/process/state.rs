//! What the store knows, without sockets: who has joined, what was left, who waits for what, who is missing.

use super::server::StoreOptions;
use super::wire::{Ask, Attempt, Mode, Tell};
use crate::engine::standing::{Standing, apart, ranks_in_words};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// What follows from a change: words for processes.
pub(super) type Changes = Vec<(u32, Tell)>;

/// How much longer a process is waited for while it says that it computes, or where that is to be expected.
const BUSY: u32 = 10;

#[derive(Debug)]
struct Process {
    /// The attempt by which it has joined.
    joined: Option<Attempt>,
    /// It has said something since.
    spoke: bool,
    left: bool,
    /// Its connection ended without a word.
    cut: Option<Instant>,
    heard: Instant,
    /// When its progress changed last.
    moved: Instant,
    progress: u64,
    running: u32,
    /// Where its hosts stood last.
    standing: Vec<Standing>,
    /// Where it runs.
    place: String,
}

#[derive(Debug)]
struct Gathering {
    since: Instant,
    mode: Mode,
    /// By process: its data, and the request to answer.
    brought: Vec<Option<(u64, Vec<u8>)>>,
}

#[derive(Debug)]
struct Wait {
    process: u32,
    request: u64,
    since: Instant,
    patient: bool,
}

/// See the module documentation.
#[derive(Debug)]
pub(super) struct State {
    timeout: Duration,
    silence: Duration,
    grace: Duration,
    began: Instant,
    processes: Vec<Process>,
    /// By key: data, and how many more answers it is kept for (`None`: any number).
    kept: BTreeMap<String, (Vec<u8>, Option<u32>)>,
    waits: BTreeMap<String, Vec<Wait>>,
    gatherings: BTreeMap<String, Gathering>,
    failure: Option<Ended>,
}

/// What ended the run.
#[derive(Clone, Debug)]
struct Ended {
    process: u32,
    cause: String,
    /// The cause's end: where hosts stood when it came.
    apart: String,
}

impl Ended {
    fn tell(&self) -> Tell {
        let it = self.clone();
        Tell::Failed {
            process: it.process,
            cause: it.cause,
            apart: it.apart,
        }
    }
}

impl State {
    pub(super) fn new(options: &StoreOptions, now: Instant) -> Self {
        let process = || Process {
            joined: None,
            spoke: false,
            left: false,
            cut: None,
            heard: now,
            moved: now,
            progress: 0,
            running: 0,
            standing: Vec::new(),
            place: String::new(),
        };
        Self {
            timeout: options.timeout,
            silence: options.silence,
            grace: options.grace,
            began: now,
            processes: (0..options.processes).map(|_| process()).collect(),
            kept: BTreeMap::new(),
            waits: BTreeMap::new(),
            gatherings: BTreeMap::new(),
            failure: None,
        }
    }

    /// Who failed first, and why.
    pub(super) fn failure(&self) -> Option<(u32, String)> {
        let it = self.failure.as_ref()?;
        Some((it.process, format!("{}{}", it.cause, it.apart)))
    }

    /// Whether nobody will say anything any more.
    pub(super) fn is_over(&self) -> bool {
        self.processes.iter().all(|p| p.left || p.cut.is_some())
    }

    /// A process wants to take part. A later attempt of one that does replaces the earlier one, which it has given up.
    pub(super) fn join(
        &mut self,
        process: u32,
        attempt: Attempt,
        place: &str,
        now: Instant,
    ) -> Result<(), String> {
        let count = self.processes.len();
        let Some(p) = self.processes.get_mut(process as usize) else {
            return Err(format!("there is no rank {process} of {count}"));
        };
        match p.joined {
            Some(it) if it.instance != attempt.instance => {
                return Err(format!(
                    "two processes claim to be rank {process}: one on {}, one on {place}",
                    p.place
                ));
            }
            Some(it) if it.number >= attempt.number => {
                return Err(format!("rank {process} has connected again since"));
            }
            _ => {}
        }
        (p.joined, p.spoke) = (Some(attempt), false);
        (p.heard, p.moved) = (now, now);
        p.place = place.to_owned();
        Ok(())
    }

    pub(super) fn welcome(&self, process: u32) -> Changes {
        let failed = self.failure.iter();
        failed.map(|it| (process, it.tell())).collect()
    }

    pub(super) fn hear(&mut self, process: u32, ask: Ask, now: Instant) -> Changes {
        let Some(p) = self.processes.get_mut(process as usize) else {
            return Vec::new();
        };
        (p.heard, p.spoke) = (now, true);
        match ask {
            Ask::Hello { .. } => Vec::new(),
            Ask::Beat {
                progress,
                running,
                standing,
            } => {
                if p.progress != progress {
                    p.moved = now;
                }
                (p.progress, p.running, p.standing) = (progress, running, standing);
                vec![(process, Tell::Alive)]
            }
            Ask::Bye => {
                p.left = true;
                Vec::new()
            }
            Ask::Fail { cause, waited } => match waited {
                false => self.fail(process, &cause),
                true => self.give_up(process, &cause),
            },
            Ask::Put { key, uses, data } => {
                let waits = self.waits.remove(&key).unwrap_or_default();
                self.kept
                    .insert(key.clone(), (data, (uses > 0).then_some(uses)));
                waits
                    .iter()
                    .filter_map(|w| self.fetch(&key, w.process, w.request))
                    .collect()
            }
            Ask::Get {
                request,
                key,
                patient,
            } => match self.fetch(&key, process, request) {
                Some(change) => vec![change],
                None => {
                    self.waits.entry(key).or_default().push(Wait {
                        process,
                        request,
                        since: now,
                        patient,
                    });
                    Vec::new()
                }
            },
            Ask::Gather {
                request,
                key,
                mode,
                data,
            } => self.gather(process, request, key, mode, data, now),
        }
    }

    /// An answer with a key's data, if it is there.
    fn fetch(&mut self, key: &str, process: u32, request: u64) -> Option<(u32, Tell)> {
        let (data, left) = self.kept.get_mut(key)?;
        let tell = answer(request, vec![data.clone()]);
        if let Some(left) = left {
            *left -= 1;
            if *left == 0 {
                self.kept.remove(key);
            }
        }
        Some((process, tell))
    }

    fn gather(
        &mut self,
        process: u32,
        request: u64,
        key: String,
        mode: Mode,
        data: Vec<u8>,
        now: Instant,
    ) -> Changes {
        let count = self.processes.len();
        let g = self
            .gatherings
            .entry(key.clone())
            .or_insert_with(|| Gathering {
                since: now,
                mode,
                brought: vec![None; count],
            });
        g.brought[process as usize] = Some((request, data));
        if g.brought.iter().any(Option::is_none) {
            return Vec::new();
        }
        let Some(done) = self.gatherings.remove(&key) else {
            return Vec::new();
        };
        let (requests, parts): (Vec<u64>, Vec<Vec<u8>>) =
            done.brought.into_iter().flatten().unzip();
        let of = |process: usize| {
            if done.mode.all || process == 0 {
                parts.clone()
            } else {
                Vec::new()
            }
        };
        requests
            .iter()
            .enumerate()
            .map(|(p, request)| (p as u32, answer(*request, of(p))))
            .collect()
    }

    /// A process cannot go on; everybody hears of it.
    pub(super) fn fail(&mut self, process: u32, cause: &str) -> Changes {
        self.end(process, cause, String::new())
    }

    /// Somebody was waited for in vain, which the process says or is to blame for: where hosts stand shows who.
    fn give_up(&mut self, process: u32, cause: &str) -> Changes {
        let all = self.processes.iter().flat_map(|p| &p.standing);
        let apart = apart(all);
        self.end(process, cause, apart)
    }

    fn end(&mut self, process: u32, cause: &str, apart: String) -> Changes {
        if self.failure.is_some() {
            return Vec::new();
        }
        let it = Ended {
            process,
            cause: cause.to_owned(),
            apart,
        };
        let tell = it.tell();
        self.failure = Some(it);
        self.waits.clear();
        self.gatherings.clear();
        (0..self.processes.len() as u32)
            .map(|p| (p, tell.clone()))
            .collect()
    }

    /// The connection of an attempt ended; whether it was the process's last one. What follows is for the clock to say, which
    /// knows whether the store was stopped meanwhile.
    pub(super) fn disconnected(&mut self, process: u32, attempt: Attempt, now: Instant) -> bool {
        let Some(p) = self.processes.get_mut(process as usize) else {
            return false;
        };
        if p.joined != Some(attempt) {
            return false;
        }
        if p.spoke {
            p.cut = Some(now);
        } else {
            // Whoever has been let in says at once that it lives: this attempt was given up before, and another one follows.
            p.joined = None;
        }
        true
    }

    /// The store itself was stopped for so long, until now: nobody's silence follows from that, and nobody has waited.
    pub(super) fn go_on(&mut self, stopped: Duration, now: Instant) {
        // What came after the stop has no more time than it would have had.
        let later = |t: Instant| (t + stopped).min(now);
        self.began = later(self.began);
        for p in &mut self.processes {
            (p.heard, p.moved) = (now, now);
            p.cut = p.cut.map(later);
        }
        for g in self.gatherings.values_mut() {
            g.since = later(g.since);
        }
        for w in self.waits.values_mut().flatten() {
            w.since = later(w.since);
        }
    }

    /// Time has passed.
    pub(super) fn tick(&mut self, now: Instant) -> Changes {
        if self.failure.is_some() {
            return Vec::new();
        }
        let since = |t: Instant| now.saturating_duration_since(t);
        for (i, p) in (0u32..).zip(&self.processes) {
            if !p.left && p.cut.is_some_and(|cut| since(cut) >= self.grace) {
                let what = format!("rank {i} ({}) died: its connection was closed", p.place);
                return self.fail(i, &what);
            }
            if p.joined.is_some() && !p.left && since(p.heard) >= self.silence {
                let what = format!(
                    "rank {i} ({}) has not responded for {:.1?}",
                    p.place,
                    since(p.heard)
                );
                return self.fail(i, &what);
            }
        }
        let late = self
            .missing_at_the_start(now)
            .or_else(|| self.late_gathering(now));
        match late {
            Some((process, what)) => self.give_up(process, &what),
            None => self.late_waits(now),
        }
    }

    fn missing_at_the_start(&self, now: Instant) -> Option<(u32, String)> {
        let waited = now.saturating_duration_since(self.began);
        let missing = self.who(|_, p| p.joined.is_none());
        let (&first, _) = missing.split_first()?;
        (waited >= self.timeout).then(|| {
            let n = self.processes.len();
            let what = format!(
                "{} of {n} did not start within {:.1?}",
                ranks_in_words(&missing),
                self.timeout
            );
            (first, what)
        })
    }

    /// A gathering whose missing processes have not moved for too long.
    fn late_gathering(&self, now: Instant) -> Option<(u32, String)> {
        self.gatherings.iter().find_map(|(key, g)| {
            let missing = self.who(|i, _| g.brought[i].is_none());
            // How long each has not moved, and may not.
            let idle = missing.iter().map(|i| {
                let p = &self.processes[*i as usize];
                let patience = match p.running {
                    0 => self.timeout,
                    _ => self.timeout * BUSY,
                };
                let moved = p.moved.max(g.since);
                (now.saturating_duration_since(moved), patience)
            });
            let late = idle.clone().all(|(idle, patience)| idle >= patience);
            let least = idle.map(|(idle, _)| idle).min()?;
            (!g.mode.patient && late).then(|| {
                let what = format!(
                    "{} did not reach `{}` and {} not made progress for {least:.1?}",
                    ranks_in_words(&missing),
                    name(key),
                    if missing.len() == 1 { "has" } else { "have" },
                );
                (missing[0], what)
            })
        })
    }

    /// Waits for keys that nobody has left: the one who waits decides what it means.
    fn late_waits(&mut self, now: Instant) -> Changes {
        let timeout = self.timeout;
        let mut changes = Vec::new();
        for (key, waits) in &mut self.waits {
            waits.retain(|w| {
                let patience = if w.patient { timeout * BUSY } else { timeout };
                let late = now.saturating_duration_since(w.since) >= patience;
                if late {
                    let why = format!("no rank published `{key}` within {patience:.1?}");
                    let request = w.request;
                    changes.push((w.process, Tell::Late { request, why }));
                }
                !late
            });
        }
        self.waits.retain(|_, w| !w.is_empty());
        changes
    }

    fn who(&self, is: impl Fn(usize, &Process) -> bool) -> Vec<u32> {
        let all = self.processes.iter().enumerate();
        all.filter(|(i, p)| is(*i, p))
            .map(|(i, _)| i as u32)
            .collect()
    }
}

fn answer(request: u64, parts: Vec<Vec<u8>>) -> Tell {
    Tell::Answer { request, parts }
}

/// A gathering's name without its number.
fn name(key: &str) -> &str {
    key.rsplit_once('#').map_or(key, |(name, _)| name)
}

#[cfg(test)]
mod tests;
