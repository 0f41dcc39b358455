//! What the processes of a run tell one another.

use super::alone::Alone;
use super::client::{Client, LAST_RESORT, LastResort, Meeting};
use super::facts;
use super::server::{Server, StoreOptions};
use super::wire::Mode;
use crate::device::abort::{Abort, lock};
use crate::engine::standing::Standings;
use std::collections::BTreeMap;
use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

/// Why processes did not come together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PeerError {
    /// Somebody did not come in time; says who.
    #[error("{0}")]
    Timeout(String),
    /// A process failed or is gone; says which and why.
    #[error("{0}")]
    Failed(String),
}

/// The processes of a run, as one of them sees them. A process alone is its own and only peer: its rank threads meet here
/// as those of several processes do.
#[derive(Debug)]
pub struct Peers {
    process: u32,
    processes: u32,
    link: Link,
    sessions: AtomicU32,
    /// How often each name was used: processes use names equally often.
    names: Mutex<BTreeMap<String, u64>>,
}

#[derive(Debug)]
enum Link {
    Alone(Alone),
    /// The client goes before the server.
    Store(Client, Option<Server>),
}

impl Peers {
    /// One process.
    #[must_use]
    pub fn alone() -> Self {
        Self::of(0, 1, Link::Alone(Alone::new(LAST_RESORT)))
    }

    /// Joins the store that another process keeps.
    ///
    /// # Errors
    /// When it is not found in time, or refuses this process.
    pub fn connect(meeting: &Meeting) -> Result<Self, PeerError> {
        let client = Client::connect(meeting)?;
        let link = Link::Store(client, None);
        Ok(Self::of(meeting.process, meeting.processes, link))
    }

    /// Keeps the store at the first of the meeting's ports that is free, and joins it.
    ///
    /// # Errors
    /// When none of the ports is free.
    pub fn host(meeting: &Meeting, options: StoreOptions) -> Result<Self, PeerError> {
        let mut last = "there is none".to_owned();
        for port in &meeting.ports {
            let server = TcpListener::bind(("0.0.0.0", *port))
                .and_then(|listener| Server::start(listener, options.clone()));
            match server {
                Ok(server) => {
                    let here = Meeting {
                        host: "127.0.0.1".to_owned(),
                        ports: vec![server.address().port()],
                        ..meeting.clone()
                    };
                    let client = Client::connect(&here)?;
                    let link = Link::Store(client, Some(server));
                    return Ok(Self::of(meeting.process, meeting.processes, link));
                }
                Err(e) => last = format!("port {port}: {e}"),
            }
        }
        Err(PeerError::Failed(format!(
            "rank {} cannot open the store on any of the ports {:?}: {last} (to use another port, set MASTER_PORT or SHARDLAB_PORT to the same value for all ranks)",
            meeting.process, meeting.ports
        )))
    }

    fn of(process: u32, processes: u32, link: Link) -> Self {
        Self {
            process,
            processes,
            link,
            sessions: AtomicU32::new(0),
            names: Mutex::default(),
        }
    }

    /// Number of this process.
    #[must_use]
    pub fn process(&self) -> u32 {
        self.process
    }

    /// How many processes there are.
    #[must_use]
    pub fn processes(&self) -> u32 {
        self.processes
    }

    /// Numbers sessions: processes open the same ones in the same order.
    pub(crate) fn next_session(&self) -> u32 {
        self.sessions.fetch_add(1, Ordering::Relaxed)
    }

    /// What to do when something has failed, in another process or among the ranks of this one, and this process has not
    /// ended a while later, because some call of a library cannot be interrupted. Without it such a process stays.
    pub fn set_last_resort(&self, f: LastResort) {
        match &self.link {
            Link::Alone(alone) => alone.set_last_resort(f),
            Link::Store(client, _) => client.set_last_resort(f),
        }
    }

    /// Leaves `data` under `key` for whoever asks. A key is used once in a run.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn put(&self, key: &str, data: Vec<u8>) -> Result<(), PeerError> {
        self.put_for(key, 0, data)
    }

    /// Likewise, for so many who ask; then it is forgotten. For 0 it stays.
    pub(crate) fn put_for(&self, key: &str, uses: u32, data: Vec<u8>) -> Result<(), PeerError> {
        match &self.link {
            Link::Alone(alone) => {
                alone.put(key, data);
                Ok(())
            }
            Link::Store(client, _) => client.put(key, uses, data),
        }
    }

    /// What somebody leaves under `key`; waits for it.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn get(&self, key: &str) -> Result<Vec<u8>, PeerError> {
        self.fetch(key, false)
    }

    /// Likewise, where somebody does what takes its time before it leaves it (chooses kernels, compiles them): waits several
    /// times as long, as long as all live.
    #[cfg(feature = "cuda")]
    pub(crate) fn get_patiently(&self, key: &str) -> Result<Vec<u8>, PeerError> {
        self.fetch(key, true)
    }

    fn fetch(&self, key: &str, patient: bool) -> Result<Vec<u8>, PeerError> {
        match &self.link {
            Link::Alone(alone) => alone.get(key),
            Link::Store(client, _) => client.get(key, patient),
        }
    }

    /// Everybody's data, by process. Every process calls it equally often with each name. Waits as long as those who are
    /// missing move.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn all_gather(&self, name: &str, data: Vec<u8>) -> Result<Vec<Vec<u8>>, PeerError> {
        self.bring(name, false, true, data)
    }

    /// Likewise, and nobody is given up for being late: as long as the others live, they are waited for (files).
    ///
    /// # Errors
    /// [`PeerError::Failed`].
    pub fn all_gather_patiently(
        &self,
        name: &str,
        data: Vec<u8>,
    ) -> Result<Vec<Vec<u8>>, PeerError> {
        self.bring(name, true, true, data)
    }

    /// Everybody's data, by process, for the process that leads; nothing for the others.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn gather(&self, name: &str, data: Vec<u8>) -> Result<Option<Vec<Vec<u8>>>, PeerError> {
        let parts = self.bring(name, true, false, data)?;
        Ok((self.process == 0).then_some(parts))
    }

    /// The data of the process that leads, which is waited for as long as it lives.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn broadcast(&self, name: &str, data: Vec<u8>) -> Result<Vec<u8>, PeerError> {
        if let Link::Alone(_) = self.link {
            return Ok(data);
        }
        let mine = if self.process == 0 { data } else { Vec::new() };
        let parts = self.bring(name, true, true, mine)?;
        Ok(parts.into_iter().next().unwrap_or_default())
    }

    /// Everybody must have the same facts, for example the digest of the program.
    ///
    /// # Errors
    /// [`PeerError::Failed`] names the rank and the fact that differ; [`PeerError`].
    pub fn agree(&self, mine: &[(&str, String)]) -> Result<(), PeerError> {
        let all = self.all_gather("configuration", facts::text(mine))?;
        let Some(difference) = facts::difference(&all) else {
            return Ok(());
        };
        let what = format!("{difference}: all ranks need the same scenario, options and program");
        self.fail(&what);
        Err(PeerError::Failed(what))
    }

    fn bring(
        &self,
        name: &str,
        patient: bool,
        all: bool,
        data: Vec<u8>,
    ) -> Result<Vec<Vec<u8>>, PeerError> {
        let Link::Store(client, _) = &self.link else {
            return Ok(vec![data]);
        };
        let number = {
            let mut names = lock(&self.names);
            let next = names.entry(name.to_owned()).or_insert(0);
            *next += 1;
            *next
        };
        client.gather(format!("{name}#{number}"), Mode { patient, all }, data)
    }

    /// From now on a failure of another process ends the waits of this one's ranks, and its progress and its hosts' places are
    /// seen.
    pub(crate) fn watch(&self, abort: &Arc<Abort>, standings: &Arc<Standings>) {
        match &self.link {
            Link::Alone(alone) => alone.watch(abort, Arc::downgrade(standings)),
            Link::Store(client, _) => client.watch(abort, Arc::downgrade(standings)),
        }
    }

    /// Tells every other process that this one cannot go on, and why.
    pub fn fail(&self, cause: &str) {
        if let Link::Store(client, _) = &self.link {
            client.fail(cause);
        }
    }

    /// Likewise, where it has waited for something in vain: the others hear where the hosts of all processes stand as well, if they
    /// stand apart. That, as the end of a cause, is returned; it may be empty.
    pub fn give_up(&self, cause: &str) -> String {
        match &self.link {
            Link::Alone(_) => String::new(),
            Link::Store(client, _) => client.give_up(cause),
        }
    }

    /// Why the run has failed, once it has.
    #[must_use]
    pub fn failure(&self) -> Option<String> {
        match &self.link {
            Link::Alone(_) => None,
            Link::Store(client, _) => client.failure(),
        }
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        let Link::Store(client, server) = &self.link else {
            return;
        };
        client.leave();
        if let Some(server) = server {
            // The others may still want something, if only to hear why the run has failed.
            let _ = server.wait_for_leave(LAST_RESORT);
        }
    }
}
