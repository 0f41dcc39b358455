//! The processes of a run, from the point of view of one of them.

use super::client::Client;
use super::config_check;
use super::error::PeerError;
use super::force_exit::{ExitHook, FORCE_EXIT_AFTER};
use super::local_store::LocalStore;
use super::protocol::GatherMode;
use super::rendezvous::{Rendezvous, StoreOptions};
use super::server::Server;
use crate::base::abort::{Abort, lock};
use crate::base::divergence::LocalProgress;
use std::collections::BTreeMap;
use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

/// Connects the processes of a run: a key-value store, gathers and failures.
///
/// A process without peers has its own group, in which its rank threads exchange data just as the
/// threads of several processes do.
#[derive(Debug)]
pub struct ProcessGroup {
    process: u32,
    processes: u32,
    link: Link,
    sessions: AtomicU32,
    /// Number of uses of each name. All processes use a name the same number of times.
    names: Mutex<BTreeMap<String, u64>>,
}

#[derive(Debug)]
enum Link {
    Local(LocalStore),
    /// The client is dropped before the server.
    Store(Client, Option<Server>),
}

impl ProcessGroup {
    /// Creates the group of a process without peers.
    #[must_use]
    pub fn single() -> Self {
        Self::of(0, 1, Link::Local(LocalStore::new(FORCE_EXIT_AFTER)))
    }

    /// Joins the store that another process runs.
    ///
    /// # Errors
    /// Returns [`PeerError`] if the store is not found in time or rejects this process.
    pub fn connect(rendezvous: &Rendezvous) -> Result<Self, PeerError> {
        let client = Client::connect(rendezvous)?;
        let link = Link::Store(client, None);
        Ok(Self::of(rendezvous.process, rendezvous.processes, link))
    }

    /// Runs the store on the first free port of the rendezvous, and joins it.
    ///
    /// # Errors
    /// Returns [`PeerError`] if no port is free.
    pub fn host(rendezvous: &Rendezvous, options: StoreOptions) -> Result<Self, PeerError> {
        let mut last = "there is none".to_owned();
        for port in &rendezvous.ports {
            let server = TcpListener::bind(("0.0.0.0", *port))
                .and_then(|listener| Server::start(listener, options.clone()));
            match server {
                Ok(server) => {
                    let here = Rendezvous {
                        host: "127.0.0.1".to_owned(),
                        ports: vec![server.address().port()],
                        ..rendezvous.clone()
                    };
                    let client = Client::connect(&here)?;
                    let link = Link::Store(client, Some(server));
                    return Ok(Self::of(rendezvous.process, rendezvous.processes, link));
                }
                Err(e) => last = format!("port {port}: {e}"),
            }
        }
        Err(PeerError::Failed(format!(
            "rank {} cannot open the store on any of the ports {:?}: {last} (to use another port, set MASTER_PORT or SHARDLAB_PORT to the same value for all ranks)",
            rendezvous.process, rendezvous.ports
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

    /// Returns the index of this process.
    #[must_use]
    pub fn process(&self) -> u32 {
        self.process
    }

    /// Returns the number of processes.
    #[must_use]
    pub fn processes(&self) -> u32 {
        self.processes
    }

    /// Returns the number of a new session. Processes open the same sessions in the same order.
    pub(crate) fn next_session(&self) -> u32 {
        self.sessions.fetch_add(1, Ordering::Relaxed)
    }

    /// Sets the hook that ends this process if it is still alive some time after a failure in this
    /// process or another one, because a library call cannot be interrupted. Without a hook, such a
    /// process stays alive.
    pub fn set_exit_hook(&self, hook: ExitHook) {
        match &self.link {
            Link::Local(store) => store.set_exit_hook(hook),
            Link::Store(client, _) => client.set_exit_hook(hook),
        }
    }

    /// Stores `data` under `key`. A key must be used only once per run.
    ///
    /// # Errors
    /// Returns [`PeerError`] if the rendezvous store cannot be reached, or if a process has failed.
    pub fn put(&self, key: &str, data: Vec<u8>) -> Result<(), PeerError> {
        self.put_for(key, 0, data)
    }

    /// Stores `data` under `key` until it has been read `uses` times; 0 keeps it.
    pub(crate) fn put_for(&self, key: &str, uses: u32, data: Vec<u8>) -> Result<(), PeerError> {
        match &self.link {
            Link::Local(store) => {
                store.put(key, data);
                Ok(())
            }
            Link::Store(client, _) => client.put(key, uses, data),
        }
    }

    /// Waits for the data that a process stores under `key`.
    ///
    /// # Errors
    /// Returns [`PeerError`] if the data do not arrive in time, or if a process has failed.
    pub fn get(&self, key: &str) -> Result<Vec<u8>, PeerError> {
        self.fetch(key, false)
    }

    /// Like [`ProcessGroup::get`], but with a timeout that is several times longer, because the
    /// producer compiles or autotunes kernels first.
    #[cfg(feature = "cuda")]
    pub(crate) fn get_slow(&self, key: &str) -> Result<Vec<u8>, PeerError> {
        self.fetch(key, true)
    }

    fn fetch(&self, key: &str, slow: bool) -> Result<Vec<u8>, PeerError> {
        match &self.link {
            Link::Local(store) => store.get(key),
            Link::Store(client, _) => client.get(key, slow),
        }
    }

    /// Gathers the data of all processes on all processes, in process order. Every process must
    /// call it the same number of times with each name. Waits while missing processes make
    /// progress.
    ///
    /// # Errors
    /// Returns [`PeerError`] if a process makes no progress or has failed.
    pub fn all_gather(&self, name: &str, data: Vec<u8>) -> Result<Vec<Vec<u8>>, PeerError> {
        let mode = GatherMode {
            untimed: false,
            to_all: true,
        };
        self.gather_as(name, mode, data)
    }

    /// Like [`ProcessGroup::all_gather`], without a timeout. Waits while all processes are alive,
    /// because they may read or write files.
    ///
    /// # Errors
    /// Returns [`PeerError::Failed`] if a process has failed or died.
    pub(crate) fn all_gather_untimed(
        &self,
        name: &str,
        data: Vec<u8>,
    ) -> Result<Vec<Vec<u8>>, PeerError> {
        let mode = GatherMode {
            untimed: true,
            to_all: true,
        };
        self.gather_as(name, mode, data)
    }

    /// Gathers the data of all processes on process 0, in process order; `None` on the others.
    /// Waits while all processes are alive.
    ///
    /// # Errors
    /// Returns [`PeerError`] if a process has failed or died.
    pub fn gather(&self, name: &str, data: Vec<u8>) -> Result<Option<Vec<Vec<u8>>>, PeerError> {
        let mode = GatherMode {
            untimed: true,
            to_all: false,
        };
        let parts = self.gather_as(name, mode, data)?;
        Ok((self.process == 0).then_some(parts))
    }

    /// Sends the data of process 0 to all processes. Waits while all processes are alive.
    ///
    /// # Errors
    /// Returns [`PeerError`] if a process has failed or died.
    pub fn broadcast(&self, name: &str, data: Vec<u8>) -> Result<Vec<u8>, PeerError> {
        if let Link::Local(_) = self.link {
            return Ok(data);
        }
        let mine = if self.process == 0 { data } else { Vec::new() };
        let parts = self.all_gather_untimed(name, mine)?;
        Ok(parts.into_iter().next().unwrap_or_default())
    }

    /// Checks that all processes have the same configuration, for example the digest of the
    /// program.
    ///
    /// # Errors
    /// Returns [`PeerError::Failed`] with the rank and the value that differ, or another
    /// [`PeerError`] if a process makes no progress or has failed.
    pub fn check_config(&self, mine: &[(&str, String)]) -> Result<(), PeerError> {
        let all = self.all_gather("configuration", config_check::encode(mine))?;
        let Some(difference) = config_check::first_difference(&all) else {
            return Ok(());
        };
        let what = format!("{difference}: all ranks need the same scenario, options and program");
        self.fail(&what);
        Err(PeerError::Failed(what))
    }

    fn gather_as(
        &self,
        name: &str,
        mode: GatherMode,
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
        client.gather(format!("{name}#{number}"), mode, data)
    }

    /// Watches a session. Failures of other processes end its waits, and its progress and host
    /// positions are reported to the store.
    pub(crate) fn watch(&self, abort: &Arc<Abort>, progress: &Arc<LocalProgress>) {
        match &self.link {
            Link::Local(store) => store.watch(abort, Arc::downgrade(progress)),
            Link::Store(client, _) => client.watch(abort, Arc::downgrade(progress)),
        }
    }

    /// Reports to all processes that this one has failed.
    pub fn fail(&self, cause: &str) {
        if let Link::Store(client, _) = &self.link {
            client.fail(cause);
        }
    }

    /// Reports to all processes that a wait of this one has timed out. Returns the host positions
    /// of all ranks as the end of the message; empty if they are equal.
    pub(crate) fn fail_timed_out(&self, cause: &str) -> String {
        match &self.link {
            Link::Local(_) => String::new(),
            Link::Store(client, _) => client.fail_timed_out(cause),
        }
    }

    /// Returns the reason why the run has failed, if it has.
    #[must_use]
    pub fn failure(&self) -> Option<String> {
        match &self.link {
            Link::Local(_) => None,
            Link::Store(client, _) => client.failure(),
        }
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        let Link::Store(client, server) = &self.link else {
            return;
        };
        client.disconnect();
        if let Some(server) = server {
            // The other processes may still have requests, for example for the cause of a failure.
            let _ = server.wait_for_disconnects(FORCE_EXIT_AFTER);
        }
    }
}
