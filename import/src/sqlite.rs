//! Reads tables of SQLite databases.
//!
//! Exports of Nsight Systems are plain tables that are read from start to end. This module reads
//! only those, as <https://www.sqlite.org/fileformat2.html> describes them: no indices, no SQL, no
//! write-ahead log. Bindings to the C library would be the largest dependency of the workspace.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};

/// First bytes of a database.
pub(crate) const MAGIC: &[u8] = b"SQLite format 3\0";
/// Maximum depth of a table's tree; 64-bit row ids need fewer levels.
const MAX_DEPTH: usize = 24;
/// Bytes of the file's header, before the first page's own.
const HEADER: usize = 100;

/// A value.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    Null,
    Int(i64),
    Float(f64),
    Text(String),
    Blob,
}

impl Value {
    pub(crate) fn int(&self) -> Option<i64> {
        match self {
            Self::Int(n) => Some(*n),
            _ => None,
        }
    }

    pub(crate) fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }
}

/// A table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Table {
    root: u32,
    columns: Vec<String>,
    /// The column that stands for the row id.
    row_id: Option<usize>,
}

impl Table {
    /// Makes a table with these columns, without a place in a file.
    #[cfg(test)]
    pub(crate) fn of(columns: &[&str]) -> Self {
        Self {
            root: 0,
            columns: columns.iter().map(|c| (*c).to_owned()).collect(),
            row_id: None,
        }
    }

    /// Returns the index of a column.
    pub(crate) fn column(&self, name: &str) -> Option<usize> {
        let same = |c: &String| c.eq_ignore_ascii_case(name);
        self.columns.iter().position(same)
    }
}

/// An open database.
#[derive(Debug)]
pub(crate) struct Database {
    file: File,
    page_size: usize,
    /// Bytes of a page that can hold content.
    usable: usize,
    pages: u32,
    tables: BTreeMap<String, Table>,
}

fn bad(text: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text.into())
}

impl Database {
    /// Opens a database and reads its schema.
    ///
    /// # Errors
    /// Fails if the file cannot be read, is cut off, or is not a database.
    pub(crate) fn open(mut file: File) -> io::Result<Self> {
        let length = file.seek(SeekFrom::End(0))?;
        file.seek(SeekFrom::Start(0))?;
        let mut head = [0; HEADER];
        file.read_exact(&mut head)
            .map_err(|_| bad("the database ends within its header: it was cut off"))?;
        if !head.starts_with(MAGIC) {
            return Err(bad("not an SQLite database"));
        }
        let page_size = match u16::from_be_bytes([head[16], head[17]]) {
            1 => 65_536,
            n => usize::from(n),
        };
        if !(512..=65_536).contains(&page_size) || !page_size.is_power_of_two() {
            return Err(bad(format!(
                "a page size of {page_size} bytes is not valid"
            )));
        }
        if head[56..60] != [0, 0, 0, 1] {
            return Err(bad("its texts are not UTF-8"));
        }
        let usable = page_size.saturating_sub(usize::from(head[20]));
        if usable < 480 {
            return Err(bad("its pages have no room for content"));
        }
        let pages = u32::try_from(length / page_size as u64).unwrap_or(u32::MAX);
        let mut this = Self {
            file,
            page_size,
            usable,
            pages,
            tables: BTreeMap::new(),
        };
        let schema = Table {
            root: 1,
            columns: Vec::new(),
            row_id: None,
        };
        let mut tables = BTreeMap::new();
        this.scan(&schema, &mut |row| {
            if let [kind, name, _, root, sql] = row
                && kind.text() == Some("table")
                && let (Some(name), Some(root)) = (name.text(), root.int())
                && let Ok(root) = u32::try_from(root)
            {
                tables.insert(name.to_owned(), table(root, sql.text().unwrap_or_default()));
            }
        })?;
        this.tables = tables;
        Ok(this)
    }

    /// Returns a table.
    pub(crate) fn table(&self, name: &str) -> Option<Table> {
        self.tables.get(name).cloned()
    }

    /// Returns the names of all tables.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.tables.keys().map(String::as_str)
    }

    /// Calls a function for each row of a table, in the order of row ids.
    ///
    /// # Errors
    /// Fails if the file cannot be read or is damaged.
    pub(crate) fn scan(&mut self, table: &Table, row: &mut dyn FnMut(&[Value])) -> io::Result<()> {
        let mut left = self.pages;
        self.walk(table.root, 0, table, &mut left, row)
    }

    fn page(&mut self, number: u32) -> io::Result<Vec<u8>> {
        if number == 0 || number > self.pages {
            return Err(bad(format!(
                "page {number} of {} does not exist: the database was cut off or is damaged",
                self.pages
            )));
        }
        let at = u64::from(number - 1) * self.page_size as u64;
        self.file.seek(SeekFrom::Start(at))?;
        let mut page = vec![0; self.page_size];
        self.file.read_exact(&mut page)?;
        Ok(page)
    }

    fn walk(
        &mut self,
        number: u32,
        depth: usize,
        table: &Table,
        left: &mut u32,
        row: &mut dyn FnMut(&[Value]),
    ) -> io::Result<()> {
        // Each page of a tree is visited once, so more visits mean a cycle.
        *left = left
            .checked_sub(1)
            .filter(|_| depth <= MAX_DEPTH)
            .ok_or_else(|| bad("the pages of a table form a circle: the database is damaged"))?;
        let page = self.page(number)?;
        let start = if number == 1 { HEADER } else { 0 };
        let short = || bad(format!("page {number} is damaged"));
        let field = |at: usize, n: usize| page.get(at..at + n).ok_or_else(short);
        let cells = be(field(start + 3, 2)?) as usize;
        let (kind, pointers) = match page[start] {
            0x0d => (Kind::Leaf, start + 8),
            0x05 => (Kind::Interior, start + 12),
            other => {
                return Err(bad(format!(
                    "page {number} has type {other}; a page of a table is expected"
                )));
            }
        };
        for i in 0..cells {
            let at = be(field(pointers + 2 * i, 2)?) as usize;
            match kind {
                Kind::Interior => {
                    let child = be(field(at, 4)?) as u32;
                    self.walk(child, depth + 1, table, left, row)?;
                }
                Kind::Leaf => {
                    let cell = page.get(at..).ok_or_else(short)?;
                    let (id, record) = self
                        .record(cell)
                        .map_err(|e| bad(format!("page {number}, row {}: {e}", i + 1)))?;
                    row(&values(id, &record, table)?);
                }
            }
        }
        if matches!(kind, Kind::Interior) {
            let last = be(field(start + 8, 4)?) as u32;
            self.walk(last, depth + 1, table, left, row)?;
        }
        Ok(())
    }

    /// Returns the row id and the record of a leaf's cell, with its overflow pages.
    fn record(&mut self, cell: &[u8]) -> io::Result<(i64, Vec<u8>)> {
        let mut at = 0;
        let length = varint(cell, &mut at)?;
        let id = varint(cell, &mut at)?.cast_signed();
        let most = u64::from(self.pages) * self.page_size as u64;
        let length = usize::try_from(length).ok().filter(|n| *n as u64 <= most);
        let length = length.ok_or_else(|| bad("a record is longer than the file"))?;
        let most = self.usable - 35;
        let local = if length <= most {
            length
        } else {
            let least = (self.usable - 12) * 32 / 255 - 23;
            match least + (length - least) % (self.usable - 4) {
                n if n <= most => n,
                _ => least,
            }
        };
        let short = || bad("a record ends outside of its page");
        let mut record = cell.get(at..at + local).ok_or_else(short)?.to_vec();
        if local < length {
            let pointer = cell.get(at + local..at + local + 4).ok_or_else(short)?;
            let mut next = be(pointer) as u32;
            while record.len() < length {
                let page = self.page(next)?;
                next = be(&page[..4]) as u32;
                let n = (length - record.len()).min(self.usable - 4);
                record.extend_from_slice(&page[4..4 + n]);
            }
        }
        Ok((id, record))
    }
}

#[derive(Clone, Copy)]
enum Kind {
    Leaf,
    Interior,
}

/// Returns a big-endian number.
fn be(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |n, b| (n << 8) | u64::from(*b))
}

/// Reads a number of 1 to 9 bytes.
fn varint(bytes: &[u8], at: &mut usize) -> io::Result<u64> {
    let mut n = 0;
    for i in 0..9 {
        let byte = *bytes
            .get(*at)
            .ok_or_else(|| bad("a number ends outside of its page"))?;
        *at += 1;
        if i == 8 {
            return Ok((n << 8) | u64::from(byte));
        }
        n = (n << 7) | u64::from(byte & 0x7f);
        if byte & 0x80 == 0 {
            break;
        }
    }
    Ok(n)
}

/// Returns the values of a record.
fn values(id: i64, record: &[u8], table: &Table) -> io::Result<Vec<Value>> {
    let mut at = 0;
    let header = usize::try_from(varint(record, &mut at)?).unwrap_or(usize::MAX);
    let mut body = header;
    let mut all = Vec::with_capacity(table.columns.len());
    while at < header {
        let kind = varint(record, &mut at)?;
        let size = match kind {
            0 | 8 | 9 => 0,
            1..=4 => kind as usize,
            5 => 6,
            6 | 7 => 8,
            10 | 11 => return Err(bad("a value has a reserved type")),
            n => usize::try_from((n - 12) / 2).unwrap_or(usize::MAX),
        };
        let end = body.checked_add(size);
        let bytes = end.and_then(|end| record.get(body..end));
        let bytes = bytes.ok_or_else(|| bad("a value ends outside of its record"))?;
        body += size;
        all.push(match kind {
            0 => Value::Null,
            1..=6 => {
                // Sign-extended.
                let unused = 64 - 8 * size as u32;
                Value::Int((be(bytes) << unused).cast_signed() >> unused)
            }
            7 => Value::Float(f64::from_bits(be(bytes))),
            8 => Value::Int(0),
            9 => Value::Int(1),
            n if n % 2 == 0 => Value::Blob,
            _ => Value::Text(String::from_utf8_lossy(bytes).into_owned()),
        });
    }
    if let Some(value) = table.row_id.and_then(|i| all.get_mut(i)) {
        *value = Value::Int(id);
    }
    // Old rows lack columns that were added later.
    all.resize(all.len().max(table.columns.len()), Value::Null);
    Ok(all)
}

/// Returns the columns of a table from its definition.
fn table(root: u32, sql: &str) -> Table {
    let constraint = |word: &str| {
        ["PRIMARY", "UNIQUE", "FOREIGN", "CHECK", "CONSTRAINT"]
            .iter()
            .any(|c| word.eq_ignore_ascii_case(c))
    };
    let mut columns = Vec::new();
    let mut row_id = None;
    for words in definitions(sql) {
        let Some((first, rest)) = words.split_first() else {
            continue;
        };
        let (name, is_quoted) = unquoted(first);
        if !is_quoted && constraint(&name) {
            continue;
        }
        let rest = rest.join(" ").to_ascii_uppercase();
        if rest.starts_with("INTEGER") && rest.contains("PRIMARY KEY") {
            row_id = Some(columns.len());
        }
        columns.push(name);
    }
    Table {
        root,
        columns,
        row_id,
    }
}

/// Returns the words of each column and constraint in the definition of a table. Exports of Nsight
/// Systems explain each column in a comment, which can contain commas and brackets.
fn definitions(sql: &str) -> Vec<Vec<String>> {
    let mut all = Vec::new();
    let mut words: Vec<String> = Vec::new();
    let mut word = String::new();
    let mut depth = 0_u32;
    let mut rest = sql;
    while let Some(c) = rest.chars().next() {
        let quote = match c {
            '"' | '`' | '\'' => Some(c),
            '[' => Some(']'),
            _ => None,
        };
        let comment = [("--", "\n"), ("/*", "*/")];
        let comment = comment.iter().find(|(from, _)| rest.starts_with(from));
        let length = match (quote, comment) {
            (_, Some((_, end))) => rest.find(end).map_or(rest.len(), |at| at + end.len()),
            (Some(end), None) => rest[1..].find(end).map_or(rest.len(), |at| at + 2),
            (None, None) => c.len_utf8(),
        };
        let (token, after) = rest.split_at(length);
        rest = after;
        let is_space = comment.is_some() || c.is_whitespace();
        if quote.is_none() && c == ')' {
            depth = depth.saturating_sub(1);
        }
        let ends_part = quote.is_none() && (c == ',' && depth == 1 || c == ')' && depth == 0);
        if (is_space || ends_part) && !word.is_empty() {
            words.push(std::mem::take(&mut word));
        }
        if ends_part {
            all.push(std::mem::take(&mut words));
        } else if !is_space && depth > 0 {
            word.push_str(token);
        }
        if quote.is_none() && comment.is_none() && c == '(' {
            depth += 1;
        }
    }
    all
}

/// Returns a name without its quotes, and whether it has any.
fn unquoted(word: &str) -> (String, bool) {
    let name = word.trim_matches(['"', '`', '[', ']']);
    (name.to_owned(), name.len() < word.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_read_from_definitions() {
        let t = table(
            2,
            "CREATE TABLE T (id INTEGER PRIMARY KEY, \"value\" TEXT NOT NULL, n DECIMAL(1, 2), PRIMARY KEY (id))",
        );
        assert_eq!(t.columns, ["id", "value", "n"]);
        assert_eq!((t.row_id, t.column("VALUE")), (Some(0), Some(1)));
    }

    /// The text has the form of real exports, with a comment on each column.
    #[test]
    fn comments_in_definitions_are_no_columns() {
        let t = table(
            2,
            "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (
    -- Kernels (see ENUM_KIND), by start.

    id                          INTEGER   NOT NULL   PRIMARY KEY,      -- ID, unique.
    start                       INTEGER   NOT NULL,                    -- Event start timestamp (ns).
    end                         INTEGER,  /* after start, or NULL :) */
    name                        INTEGER,                               -- REFERENCES StringIds(id) -- Function name w/ it's template
    \"a, b\"                      TEXT DEFAULT '--, (',
    bytes                       INTEGER                                -- Size (B), if known
)",
        );
        let columns = ["id", "start", "end", "name", "a, b", "bytes"];
        assert_eq!(t.columns, columns);
        assert_eq!(t.row_id, Some(0));
    }

    #[test]
    fn numbers_have_one_to_nine_bytes() {
        for (bytes, n) in [
            (&[0x7f][..], 127),
            (&[0x81, 0x00], 128),
            (&[0xff; 9], u64::MAX),
        ] {
            assert_eq!(varint(bytes, &mut 0).unwrap(), n);
        }
        assert!(varint(&[0x80], &mut 0).is_err());
    }

    #[test]
    fn records_become_values() {
        let t = table(2, "CREATE TABLE T (id INTEGER PRIMARY KEY, a, b, c, d)");
        // Header: null, one byte, text of two, zero; the last column is missing.
        let record = [5, 0, 1, 17, 8, 0xfe, b'h', b'i'];
        let found = values(7, &record, &t).unwrap();
        assert_eq!(
            found,
            [
                Value::Int(7),
                Value::Int(-2),
                Value::Text("hi".into()),
                Value::Int(0),
                Value::Null
            ]
        );
        assert!(values(7, &[3, 17], &t).is_err());
    }
}
