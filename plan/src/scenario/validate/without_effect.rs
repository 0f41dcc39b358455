//! Keys without effect.

use super::Checked;
use crate::config::Scenario;
use crate::policies;
use crate::scenario::ScenarioErrorKind;
use crate::scenario::keys::Key;
use crate::scenario::merge::Document;
use crate::units::Bytes;

/// Rejects keys that have no effect. Exempt: keys inherited via `extends` from a base shared
/// between policies, modes or meshes, that is, where a later text than the key's own made the
/// choice; and keys whose value is the one that they would have anyway (`is_default`).
pub(super) fn check(s: &Scenario, d: &Document, is_default: &dyn Fn(Key) -> bool) -> Checked {
    let rules = policies::rules(s).rev().flat_map(|r| r.without_effect);
    for row in rules.filter(|row| row.only.is_none_or(|only| only(s))) {
        if let (Some(key), Some(by)) = (Key::at(row.key), Key::at(row.because_of))
            && is_idle(d, key, by)
            && !is_default(key)
        {
            return reject(d, key, by, row.why);
        }
    }
    for key in Key::all() {
        // Nothing is resolved of these, so that every value would look like the default.
        let unread = key.info().section == "moe" && s.moe.is_none()
            || matches!(key, Key::Imbalance | Key::RoutingSeed);
        for need in key.info().needs {
            let idle = !(need.holds)(s) && is_idle(d, key, need.by);
            if idle && (unread || !is_default(key)) {
                return reject(d, key, need.by, need.otherwise);
            }
        }
    }
    cublas_workspace(s, d)
}

/// The resolved size is 0 where there is no workspace, so that the text has to be asked.
fn cublas_workspace(s: &Scenario, d: &Document) -> Checked {
    let key = Key::CublasWorkspaceBytes;
    if d.given(key).is_none_or(|Bytes(bytes)| bytes == 0) {
        return Ok(());
    }
    if let Some(why) = s.fsdp.spec().engine.own_workspaces
        && is_idle(d, key, Key::Policy)
    {
        reject(d, key, Key::Policy, why)?;
    }
    if s.mesh.hardware == "cpu" && is_idle(d, key, Key::Hardware) {
        reject(d, key, Key::Hardware, "hardware `cpu` has no cuBLAS")?;
    }
    Ok(())
}

/// Whether the user gives a key in a text that is not older than the choice which makes it idle.
fn is_idle(d: &Document, key: Key, by: Key) -> bool {
    d.says(key) && d.layer(by) <= d.layer(key)
}

fn reject(d: &Document, key: Key, by: Key, why: &str) -> Checked {
    let message = format!("`{}` has no effect here: {why}", key.info().key);
    Err(d
        .conflict(&[key, by], message)
        .of(ScenarioErrorKind::NoEffect)
        .with_help(format!("leave it out, or change {}", by.path())))
}
