//! A draft of a scenario: the keys set so far, and the quantities that remain to be combined.

use crate::adapters::Targets;
use crate::error::{ConfigError, Place};
use crate::row::{Lack, Row, Setting, Status};
use crate::table::{Dtype, Effect, Engine, Fact, list};
use std::collections::BTreeMap;

/// A value and the row that provided it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Given<T> {
    pub(crate) value: T,
    pub(crate) row: usize,
}

/// A model as a configuration names it.
#[derive(Clone, Debug)]
pub(crate) struct NamedModel {
    pub(crate) name: String,
    pub(crate) row: usize,
}

/// See the module documentation.
#[derive(Debug, Default)]
pub(crate) struct Draft {
    pub(crate) rows: Vec<Row>,
    facts: BTreeMap<Fact, Given<u64>>,
    /// Number of rows of the command that is read. Its options replace those of files.
    command: usize,
    /// Rows that repeat an earlier row, each with the earlier one.
    agreeing: Vec<(usize, usize)>,
    /// Layers that get adapters, with the rows that name them.
    targets: Vec<(usize, Targets)>,
    pub(crate) engine: Option<Given<Engine>>,
    pub(crate) mixed: Option<Given<Dtype>>,
    pub(crate) weights: Option<Given<Dtype>>,
    /// Its config.json, which decides its sizes if [`Draft::model`] names a folder, too.
    pub(crate) config: Option<NamedModel>,
    pub(crate) model: Option<NamedModel>,
    /// Its name by a key that may mean something else.
    maybe_model: Option<NamedModel>,
    pub(crate) family: Option<NamedModel>,
    pub(crate) flavor: Option<NamedModel>,
}

impl Draft {
    /// Adds a row for a key.
    pub(crate) fn row(&mut self, place: Place, key: &str, value: String, status: Status) -> usize {
        self.rows.push(Row {
            place: Some(place),
            key: key.to_owned(),
            value,
            status,
            settings: Vec::new(),
            why: None,
            doubt: None,
        });
        self.rows.len() - 1
    }

    /// Applies the effect of a value.
    ///
    /// # Errors
    /// Fails if the value contradicts another one.
    pub(crate) fn apply(&mut self, row: usize, effect: Effect) -> Result<(), ConfigError> {
        match effect {
            Effect::All(all) => {
                for effect in all {
                    match effect {
                        Effect::Lost(why) => self.approximates(row, why),
                        effect => self.apply(row, effect)?,
                    }
                }
            }
            Effect::Set(key, value) => self.set(row, key, value)?,
            Effect::Assume(key, value, why) => {
                self.set(row, key, value)?;
                self.approximates(row, why);
            }
            Effect::Fact(fact, value) => self.give(row, fact, value)?,
            Effect::Targets(targets) => self.targets.push((row, targets)),
            Effect::Engine(engine) => {
                let first = *self.engine.get_or_insert(Given { value: engine, row });
                if first.value != engine {
                    return self.conflict(row, first.row);
                }
            }
            Effect::Mixed(value) => {
                if let Some(first) = self.mixed.filter(|m| m.value != value)
                    && is_flag(&self.rows[first.row].key)
                    && is_flag(&self.rows[row].key)
                {
                    let message = format!(
                        "{} is on, too: programs accept one of them",
                        self.rows[first.row].key
                    );
                    return Err(self.error(row, message));
                }
                // Arguments of the Trainer override Accelerate's `mixed_precision: no`.
                if self.mixed.is_none_or(|m| m.value == Dtype::F32) {
                    self.mixed = Some(Given { value, row });
                }
            }
            Effect::Weights(value) => {
                self.weights.get_or_insert(Given { value, row });
            }
            Effect::Config(name) => {
                self.config.get_or_insert(NamedModel { name, row });
            }
            Effect::Model(name) => {
                self.model.get_or_insert(NamedModel { name, row });
            }
            Effect::MaybeModel(name) => {
                self.maybe_model.get_or_insert(NamedModel { name, row });
            }
            Effect::Family(name) => {
                self.family.get_or_insert(NamedModel { name, row });
            }
            Effect::Flavor(name) => {
                self.flavor.get_or_insert(NamedModel { name, row });
            }
            Effect::Aside(why) => self.none(row, Lack::Nothing, why),
            Effect::Lost(why) => self.none(row, Lack::Accuracy, why),
            Effect::Decisive(why) => self.none(row, Lack::Everything, why),
        }
        Ok(())
    }

    /// Sets a scenario key.
    ///
    /// # Errors
    /// Fails if another key gives a different value.
    pub(crate) fn set(
        &mut self,
        row: usize,
        key: &'static str,
        value: String,
    ) -> Result<(), ConfigError> {
        let differs = |r: &Row| {
            let mut set = r.settings.iter();
            set.any(|s| s.key == key && s.value != value)
        };
        if let Some(before) = self.rows.iter().position(differs) {
            return self.conflict(row, before);
        }
        self.rows[row].settings.push(Setting { key, value });
        Ok(())
    }

    /// Replaces the value of a scenario key that a row has set.
    pub(crate) fn replace(&mut self, key: &str, value: &str) {
        for setting in self.rows.iter_mut().flat_map(|r| &mut r.settings) {
            if setting.key == key {
                value.clone_into(&mut setting.value);
            }
        }
    }

    /// Doubles the value of a scenario key. If the key is not set, `row` sets it to 2.
    pub(crate) fn double(&mut self, key: &'static str, row: usize) {
        let mut found = false;
        for setting in self.rows.iter_mut().flat_map(|r| &mut r.settings) {
            if setting.key == key
                && let Ok(value) = setting.value.parse::<u64>()
            {
                setting.value = value.saturating_mul(2).to_string();
                found = true;
            }
        }
        if !found {
            let value = "2".to_owned();
            self.rows[row].settings.push(Setting { key, value });
        }
    }

    /// Returns the value of a scenario key, if it is set.
    pub(crate) fn value(&self, key: &str) -> Option<&str> {
        let mut all = self.rows.iter().flat_map(|r| &r.settings);
        all.find(|s| s.key == key).map(|s| s.value.as_str())
    }

    /// Returns whether a scenario key is set to this word.
    pub(crate) fn is(&self, key: &str, word: &str) -> bool {
        let set = self.value(key);
        set.and_then(|v| v.strip_prefix('"')?.strip_suffix('"')) == Some(word)
    }

    fn give(&mut self, row: usize, fact: Fact, value: u64) -> Result<(), ConfigError> {
        match self.facts.get(&fact) {
            Some(before) if before.value != value => {
                let before = before.row;
                self.conflict(row, before)
            }
            Some(before) => {
                self.agreeing.push((row, before.row));
                Ok(())
            }
            None => {
                self.facts.insert(fact, Given { value, row });
                Ok(())
            }
        }
    }

    /// Ends the options of a command. Those of files that follow do not contradict them.
    pub(crate) fn end_command(&mut self) {
        self.command = self.command.max(self.rows.len());
    }

    /// Returns whether a row is an option of the command, and not a key of a file.
    pub(crate) fn is_of_command(&self, row: usize) -> bool {
        row < self.command
    }

    /// Handles a row that gives another value than an earlier row.
    ///
    /// # Errors
    /// Fails unless the earlier row is an option of the command that names the file of this row.
    fn conflict(&mut self, row: usize, before: usize) -> Result<(), ConfigError> {
        if before >= self.command || row < self.command || self.rows[row].place.is_none() {
            return Err(self.contradiction(row, &self.rows[before]));
        }
        let by = &self.rows[before];
        let why = format!("replaced by {} = {}", by.key, by.value);
        self.none(row, Lack::Nothing, why);
        Ok(())
    }

    fn contradiction(&self, row: usize, before: &Row) -> ConfigError {
        let row = &self.rows[row];
        let message = format!(
            "{} = {} contradicts {} = {}{}",
            row.key,
            row.value,
            before.key,
            before.value,
            before
                .place
                .as_ref()
                .map_or_else(String::new, |p| format!(" ({p})"))
        );
        self.error_at(row, message)
    }

    fn error_at(&self, row: &Row, message: String) -> ConfigError {
        match &row.place {
            Some(place) => ConfigError::place(place, message),
            None => ConfigError::Missing(message),
        }
    }

    /// Returns an error about a row.
    pub(crate) fn error(&self, row: usize, message: String) -> ConfigError {
        self.error_at(&self.rows[row], message)
    }

    /// Returns an error about the first key that makes a prediction impossible.
    pub(crate) fn refusal(&self) -> Option<ConfigError> {
        let refused = |r: &&Row| r.status.lack() == Lack::Everything;
        let row = self.rows.iter().find(refused)?;
        let why = row.why.as_deref().unwrap_or("not modeled");
        Some(self.error_at(row, format!("{} = {}: {why}", row.key, row.value)))
    }

    /// Takes the rows that name layers with adapters, together with all of these layers.
    pub(crate) fn take_targets(&mut self) -> (Vec<usize>, Option<Targets>) {
        let given = std::mem::take(&mut self.targets);
        let rows = given.iter().map(|(row, _)| *row).collect();
        let all = given.into_iter().map(|(_, targets)| targets);
        (rows, all.reduce(|all, more| all.join(&more)))
    }

    /// Removes an item from a list that rows have set, unless it is the only one, and adds a note
    /// to these rows. Returns whether it removed the item.
    pub(crate) fn drop_item(&mut self, key: &str, item: &str, why: &str) -> bool {
        let mut dropped = false;
        for row in &mut self.rows {
            let Some(setting) = row.settings.iter_mut().find(|s| s.key == key) else {
                continue;
            };
            let Some(mut items) = items(&setting.value) else {
                continue;
            };
            let before = items.len();
            items.retain(|i| i != item);
            if items.len() == before || items.is_empty() {
                continue;
            }
            setting.value = list(&items);
            row.status = Status::Assumed;
            row.why = Some(match row.why.take() {
                Some(before) if before.contains(why) => format!("{before}, {item}"),
                Some(before) => format!("{before}; {why}: {item}"),
                None => format!("{why}: {item}"),
            });
            dropped = true;
        }
        dropped
    }

    /// Names the model by a key that may mean something else, unless another key names it.
    pub(crate) fn settle_model(&mut self) {
        let Some(named) = self.maybe_model.take() else {
            return;
        };
        if self.model.is_some() {
            self.none(named.row, Lack::Nothing, "another key names the model");
        } else {
            self.model = Some(named);
        }
    }

    /// Returns a quantity.
    pub(crate) fn fact(&self, fact: Fact) -> Option<Given<u64>> {
        self.facts.get(&fact).copied()
    }

    /// Adds a row for the default of a framework's key, and returns its index.
    pub(crate) fn suppose(&mut self, key: &str, value: &str, why: &str) -> usize {
        self.rows.push(Row {
            place: None,
            key: key.to_owned(),
            value: value.to_owned(),
            status: Status::Assumed,
            settings: Vec::new(),
            why: Some(why.to_owned()),
            doubt: None,
        });
        self.rows.len() - 1
    }

    /// Gives a quantity by the default of a framework's key, unless it is given.
    pub(crate) fn suppose_fact(
        &mut self,
        fact: Fact,
        number: u64,
        key: &str,
        value: &str,
        why: &str,
    ) {
        if !self.facts.contains_key(&fact) {
            let row = self.suppose(key, value, why);
            self.facts.insert(fact, Given { value: number, row });
        }
    }

    /// Returns whether a key names layers that get adapters.
    pub(crate) fn has_targets(&self) -> bool {
        !self.targets.is_empty()
    }

    /// Removes a quantity that another one replaces.
    pub(crate) fn forget(&mut self, fact: Fact) {
        self.facts.remove(&fact);
    }

    /// Copies what a row decides to the rows that repeat it.
    pub(crate) fn share(&mut self) {
        for (row, first) in std::mem::take(&mut self.agreeing) {
            let (status, why) = (self.rows[first].status, self.rows[first].why.clone());
            let settings = self.rows[first].settings.clone();
            let row = &mut self.rows[row];
            if row.settings.is_empty() {
                (row.status, row.why, row.settings) = (status, why, settings);
            }
        }
    }

    /// Marks a row as an approximation.
    pub(crate) fn approximates(&mut self, row: usize, why: impl Into<String>) {
        let row = &mut self.rows[row];
        row.status = Status::Assumed;
        row.why.get_or_insert(why.into());
    }

    /// Marks a row as having no counterpart.
    pub(crate) fn none(&mut self, row: usize, lack: Lack, why: impl Into<String>) {
        let row = &mut self.rows[row];
        row.status = Status::NoCounterpart(lack);
        row.why = Some(why.into());
    }

    /// Sets a scenario key that no key of the files decides. Keeps a value that is already set.
    pub(crate) fn assume(&mut self, key: &'static str, value: impl Into<String>, why: &str) {
        self.supply(key, value.into(), Status::Assumed, why);
    }

    /// Sets a scenario key from a command-line option. Keeps a value that is already set.
    pub(crate) fn option(&mut self, key: &'static str, value: impl Into<String>, option: &str) {
        self.supply(key, value.into(), Status::Used, option);
    }

    fn supply(&mut self, key: &'static str, value: String, status: Status, why: &str) {
        if self.value(key).is_some() {
            return;
        }
        self.rows.push(Row {
            place: None,
            key: key.to_owned(),
            value: value.clone(),
            status,
            settings: vec![Setting { key, value }],
            why: Some(why.to_owned()),
            doubt: None,
        });
    }

    /// Removes a scenario key that a prediction does not use, and notes why.
    pub(crate) fn unset(&mut self, key: &str, lack: Lack, why: &str) {
        self.rows.retain_mut(|row| {
            let before = row.settings.len();
            row.settings.retain(|s| s.key != key);
            if row.settings.len() == before || !row.settings.is_empty() {
                return true;
            }
            row.status = Status::NoCounterpart(lack);
            row.why = Some(why.to_owned());
            row.place.is_some()
        });
    }
}

/// Parses a list of strings written as TOML.
fn items(text: &str) -> Option<Vec<String>> {
    let table: toml::Table = toml::from_str(&format!("list = {text}")).ok()?;
    let items = table.get("list")?.as_array()?.iter();
    items.map(|i| i.as_str().map(str::to_owned)).collect()
}
/// Returns whether a key is one of the flags that turn mixed precision on.
fn is_flag(key: &str) -> bool {
    matches!(key.trim_start_matches('-'), "bf16" | "fp16")
}
