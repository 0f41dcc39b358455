//! State of the store, without sockets or clocks: members, stored data, waits and time limits.

use super::protocol::{Attempt, GatherMode, Request, Response};
use super::rendezvous::StoreOptions;
use crate::base::divergence::{RankProgress, describe_divergence, list_ranks};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Messages that result from a change, by process.
pub(super) type Changes = Vec<(u32, Response)>;

/// Factor by which the timeout is longer while a process runs kernels, or if its data are slow.
const BUSY: u32 = 10;

#[derive(Debug)]
struct Process {
    /// Attempt by which it has joined.
    joined: Option<Attempt>,
    /// Whether it has sent a message since it joined.
    active: bool,
    /// Whether it has disconnected cleanly.
    left: bool,
    /// Time at which its connection ended without [`Request::Disconnect`].
    lost_at: Option<Instant>,
    heard_at: Instant,
    /// Time at which its progress last changed.
    progressed_at: Instant,
    progress: u64,
    running: u32,
    /// Last host positions of its ranks.
    ranks: Vec<RankProgress>,
    /// Host and process id.
    location: String,
}

#[derive(Debug)]
struct Gather {
    since: Instant,
    mode: GatherMode,
    /// By process: the request to answer, and the data.
    arrived: Vec<Option<(u64, Vec<u8>)>>,
}

#[derive(Debug)]
struct Wait {
    process: u32,
    request: u64,
    since: Instant,
    slow: bool,
}

/// See the module documentation.
#[derive(Debug)]
pub(super) struct State {
    timeout: Duration,
    silence: Duration,
    grace: Duration,
    started_at: Instant,
    processes: Vec<Process>,
    /// By key: the data, and the remaining number of answers (`None`: any number).
    values: BTreeMap<String, (Vec<u8>, Option<u32>)>,
    waits: BTreeMap<String, Vec<Wait>>,
    gathers: BTreeMap<String, Gather>,
    failure: Option<RunFailure>,
}

/// The failure that ended the run.
#[derive(Clone, Debug)]
struct RunFailure {
    process: u32,
    cause: String,
    /// Host positions at the time of the failure, as the end of its message.
    divergence: String,
}

impl RunFailure {
    fn response(&self) -> Response {
        let it = self.clone();
        Response::Failed {
            process: it.process,
            cause: it.cause,
            divergence: it.divergence,
        }
    }
}

impl State {
    pub(super) fn new(options: &StoreOptions, now: Instant) -> Self {
        let process = || Process {
            joined: None,
            active: false,
            left: false,
            lost_at: None,
            heard_at: now,
            progressed_at: now,
            progress: 0,
            running: 0,
            ranks: Vec::new(),
            location: String::new(),
        };
        Self {
            timeout: options.timeout,
            silence: options.silence,
            grace: options.grace,
            started_at: now,
            processes: (0..options.processes).map(|_| process()).collect(),
            values: BTreeMap::new(),
            waits: BTreeMap::new(),
            gathers: BTreeMap::new(),
            failure: None,
        }
    }

    /// Returns the process that failed first, and the message.
    pub(super) fn failure(&self) -> Option<(u32, String)> {
        let it = self.failure.as_ref()?;
        Some((it.process, format!("{}{}", it.cause, it.divergence)))
    }

    /// Returns whether every process has disconnected or lost its connection.
    pub(super) fn is_over(&self) -> bool {
        self.processes.iter().all(|p| p.left || p.lost_at.is_some())
    }

    /// Admits a process. A later attempt replaces an earlier one of the same process, which has
    /// abandoned it.
    ///
    /// # Errors
    /// Returns a message if the process is unknown, or if another process claims to be the same
    /// rank.
    pub(super) fn join(
        &mut self,
        process: u32,
        attempt: Attempt,
        location: &str,
        now: Instant,
    ) -> Result<(), String> {
        let count = self.processes.len();
        let Some(p) = self.processes.get_mut(process as usize) else {
            return Err(format!("there is no rank {process} of {count}"));
        };
        match p.joined {
            Some(it) if it.instance != attempt.instance => {
                return Err(format!(
                    "two processes claim to be rank {process}: one on {}, one on {location}",
                    p.location
                ));
            }
            Some(it) if it.number >= attempt.number => {
                return Err(format!("rank {process} has connected again since"));
            }
            _ => {}
        }
        (p.joined, p.active) = (Some(attempt), false);
        (p.heard_at, p.progressed_at) = (now, now);
        p.location = location.to_owned();
        Ok(())
    }

    /// Returns the message for a process that joins a run that has failed.
    pub(super) fn known_failure(&self, process: u32) -> Changes {
        let failed = self.failure.iter();
        failed.map(|it| (process, it.response())).collect()
    }

    /// Handles a message of a process.
    pub(super) fn handle(&mut self, process: u32, message: Request, now: Instant) -> Changes {
        let Some(p) = self.processes.get_mut(process as usize) else {
            return Vec::new();
        };
        (p.heard_at, p.active) = (now, true);
        match message {
            Request::Hello { .. } => Vec::new(),
            Request::Heartbeat {
                progress,
                running,
                ranks,
            } => {
                if p.progress != progress {
                    p.progressed_at = now;
                }
                (p.progress, p.running, p.ranks) = (progress, running, ranks);
                vec![(process, Response::Alive)]
            }
            Request::Disconnect => {
                p.left = true;
                Vec::new()
            }
            Request::Fail { cause, timed_out } => match timed_out {
                false => self.fail(process, &cause),
                true => self.fail_timed_out(process, &cause),
            },
            Request::Put { key, uses, data } => {
                let waits = self.waits.remove(&key).unwrap_or_default();
                self.values
                    .insert(key.clone(), (data, (uses > 0).then_some(uses)));
                waits
                    .iter()
                    .filter_map(|w| self.fetch(&key, w.process, w.request))
                    .collect()
            }
            Request::Get { request, key, slow } => match self.fetch(&key, process, request) {
                Some(change) => vec![change],
                None => {
                    self.waits.entry(key).or_default().push(Wait {
                        process,
                        request,
                        since: now,
                        slow,
                    });
                    Vec::new()
                }
            },
            Request::Gather {
                request,
                key,
                mode,
                data,
            } => self.gather(process, request, key, mode, data, now),
        }
    }

    /// Answers a request with the data of a key, if they are stored.
    fn fetch(&mut self, key: &str, process: u32, request: u64) -> Option<(u32, Response)> {
        let (data, left) = self.values.get_mut(key)?;
        let response = answer(request, vec![data.clone()]);
        if let Some(left) = left {
            *left -= 1;
            if *left == 0 {
                self.values.remove(key);
            }
        }
        Some((process, response))
    }

    fn gather(
        &mut self,
        process: u32,
        request: u64,
        key: String,
        mode: GatherMode,
        data: Vec<u8>,
        now: Instant,
    ) -> Changes {
        let count = self.processes.len();
        let g = self.gathers.entry(key.clone()).or_insert_with(|| Gather {
            since: now,
            mode,
            arrived: vec![None; count],
        });
        g.arrived[process as usize] = Some((request, data));
        if g.arrived.iter().any(Option::is_none) {
            return Vec::new();
        }
        let Some(done) = self.gathers.remove(&key) else {
            return Vec::new();
        };
        let (requests, parts): (Vec<u64>, Vec<Vec<u8>>) =
            done.arrived.into_iter().flatten().unzip();
        let of = |process: usize| {
            if done.mode.to_all || process == 0 {
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

    /// Ends the run because a process has failed. Every process is notified.
    pub(super) fn fail(&mut self, process: u32, cause: &str) -> Changes {
        self.end(process, cause, String::new())
    }

    /// Ends the run because a wait has timed out. `process` is the process that waited or the one
    /// that was waited for; host positions show which rank is behind.
    fn fail_timed_out(&mut self, process: u32, cause: &str) -> Changes {
        let all = self.processes.iter().flat_map(|p| &p.ranks);
        let divergence = describe_divergence(all);
        self.end(process, cause, divergence)
    }

    fn end(&mut self, process: u32, cause: &str, divergence: String) -> Changes {
        if self.failure.is_some() {
            return Vec::new();
        }
        let it = RunFailure {
            process,
            cause: cause.to_owned(),
            divergence,
        };
        let response = it.response();
        self.failure = Some(it);
        self.waits.clear();
        self.gathers.clear();
        (0..self.processes.len() as u32)
            .map(|p| (p, response.clone()))
            .collect()
    }

    /// Records the end of an attempt's connection. Returns whether it was the process's last
    /// connection. The consequences are left to [`State::tick`], because the store may have been
    /// suspended in the meantime.
    pub(super) fn connection_lost(&mut self, process: u32, attempt: Attempt, now: Instant) -> bool {
        let Some(p) = self.processes.get_mut(process as usize) else {
            return false;
        };
        if p.joined != Some(attempt) {
            return false;
        }
        if p.active {
            p.lost_at = Some(now);
        } else {
            // A process that was admitted sends a heartbeat immediately. This attempt was abandoned
            // before that, and another one follows.
            p.joined = None;
        }
        true
    }

    /// Adjusts all time limits after the store itself was suspended until `now`. During that time,
    /// processes were not silent, and nothing has waited.
    pub(super) fn resume(&mut self, suspended: Duration, now: Instant) {
        // Messages that arrived after the suspension keep their time.
        let later = |t: Instant| (t + suspended).min(now);
        self.started_at = later(self.started_at);
        for p in &mut self.processes {
            (p.heard_at, p.progressed_at) = (now, now);
            p.lost_at = p.lost_at.map(later);
        }
        for g in self.gathers.values_mut() {
            g.since = later(g.since);
        }
        for w in self.waits.values_mut().flatten() {
            w.since = later(w.since);
        }
    }

    /// Checks all time limits.
    pub(super) fn tick(&mut self, now: Instant) -> Changes {
        if self.failure.is_some() {
            return Vec::new();
        }
        let since = |t: Instant| now.saturating_duration_since(t);
        for (i, p) in (0u32..).zip(&self.processes) {
            if !p.left && p.lost_at.is_some_and(|at| since(at) >= self.grace) {
                let what = format!("rank {i} ({}) died: its connection was closed", p.location);
                return self.fail(i, &what);
            }
            if p.joined.is_some() && !p.left && since(p.heard_at) >= self.silence {
                let what = format!(
                    "rank {i} ({}) has not responded for {:.1?}",
                    p.location,
                    since(p.heard_at)
                );
                return self.fail(i, &what);
            }
        }
        let late = self
            .missing_at_the_start(now)
            .or_else(|| self.late_gather(now));
        match late {
            Some((process, what)) => self.fail_timed_out(process, &what),
            None => self.late_waits(now),
        }
    }

    /// Returns the failure if not all processes have joined in time.
    fn missing_at_the_start(&self, now: Instant) -> Option<(u32, String)> {
        let waited = now.saturating_duration_since(self.started_at);
        let missing = self.who(|_, p| p.joined.is_none());
        let (&first, _) = missing.split_first()?;
        (waited >= self.timeout).then(|| {
            let n = self.processes.len();
            let what = format!(
                "{} of {n} did not start within {:.1?}",
                list_ranks(&missing),
                self.timeout
            );
            (first, what)
        })
    }

    /// Returns the failure if the processes that a gather waits for make no progress.
    fn late_gather(&self, now: Instant) -> Option<(u32, String)> {
        self.gathers.iter().find_map(|(key, g)| {
            let missing = self.who(|i, _| g.arrived[i].is_none());
            // Time without progress of each process, and its limit.
            let idle = missing.iter().map(|i| {
                let p = &self.processes[*i as usize];
                let limit = match p.running {
                    0 => self.timeout,
                    _ => self.timeout * BUSY,
                };
                let progressed = p.progressed_at.max(g.since);
                (now.saturating_duration_since(progressed), limit)
            });
            let late = idle.clone().all(|(idle, limit)| idle >= limit);
            let least = idle.map(|(idle, _)| idle).min()?;
            (!g.mode.untimed && late).then(|| {
                let what = format!(
                    "{} did not reach `{}` and {} not made progress for {least:.1?}",
                    list_ranks(&missing),
                    name(key),
                    if missing.len() == 1 { "has" } else { "have" },
                );
                (missing[0], what)
            })
        })
    }

    /// Answers waits for keys that have timed out. The waiting process decides how to continue.
    fn late_waits(&mut self, now: Instant) -> Changes {
        let timeout = self.timeout;
        let mut changes = Vec::new();
        for (key, waits) in &mut self.waits {
            waits.retain(|w| {
                let limit = if w.slow { timeout * BUSY } else { timeout };
                let late = now.saturating_duration_since(w.since) >= limit;
                if late {
                    let why = format!("no rank published `{key}` within {limit:.1?}");
                    let request = w.request;
                    changes.push((w.process, Response::TimedOut { request, why }));
                }
                !late
            });
        }
        self.waits.retain(|_, w| !w.is_empty());
        changes
    }

    /// Returns the processes for which `is` holds.
    fn who(&self, is: impl Fn(usize, &Process) -> bool) -> Vec<u32> {
        let all = self.processes.iter().enumerate();
        all.filter(|(i, p)| is(*i, p))
            .map(|(i, _)| i as u32)
            .collect()
    }
}

fn answer(request: u64, parts: Vec<Vec<u8>>) -> Response {
    Response::Answer { request, parts }
}

/// Returns the name of a gather without its number.
fn name(key: &str) -> &str {
    key.rsplit_once('#').map_or(key, |(name, _)| name)
}

#[cfg(test)]
mod tests;
