//! The index of one KV head: trees that follow each other by position, of which forks share the older.
//!
//! Mostly there is one. The trees that a fork finds are *frozen*: both sides keep them as they are,
//! whoever is dropped first, and let a new one grow behind them; a search runs over all. A frozen tree
//! is only changed after it was copied: where it is small, or a crop reaches into it.

use crate::config::TreeOptions;
use crate::error::{Error, Result};
use crate::ids::KeyId;
use crate::index::FIRST_BULK;
use crate::rows::{Elements, Strided};
use crate::span::Span;
use crate::threads::Workers;
use crate::tree::Tree;
use crate::tree::build::Tokens;
use crate::tree::insert::Inserter;
use std::cell::RefCell;
use std::sync::Arc;

/// Trees at most: the last of as many is copied before it grows, however large.
const MOST_TREES: usize = 4;
/// A tree of at most so many tokens, or of at most one in so many of all, is copied before it grows.
const SMALL: usize = 2 * FIRST_BULK;
const SMALL_SHARE: usize = 8;

thread_local! {
    /// What insertions work with, whatever the number of heads.
    static INSERTER: RefCell<Inserter> = RefCell::new(Inserter::new(0, 0));
}

#[derive(Debug, Default)]
pub struct Forest {
    trees: Vec<Arc<Tree>>,
    /// Trees, from the first on, that forks may share.
    frozen: usize,
}

impl Forest {
    /// By position of their tokens; none of them empty.
    pub fn trees(&self) -> &[Arc<Tree>] {
        &self.trees
    }

    pub fn is_empty(&self) -> bool {
        self.trees.is_empty()
    }

    /// Tokens in all trees.
    pub fn len(&self) -> usize {
        self.trees.iter().map(|tree| tree.len).sum()
    }

    /// Another with the same trees. From now on both leave them as they are.
    pub fn fork(&mut self) -> Self {
        self.frozen = self.trees.len();
        Self {
            trees: self.trees.clone(),
            frozen: self.frozen,
        }
    }

    /// Adds the first `count` tokens of a window, those of positions `first` on, or fewer if
    /// cancelled; returns how many. A bulk as large as the last tree rebuilds it, so that chunks end
    /// with a tree as good as one built at once; the old tree stays until the new one is complete.
    pub fn add(
        &mut self,
        window: &Span,
        count: usize,
        first: KeyId,
        options: &TreeOptions,
        stream: u64,
        workers: Workers<'_>,
    ) -> Result<usize> {
        let grows = self.may_grow();
        let bulk = (window.keys.strided(), window.values.strided());
        let bulk = (bulk.0.first(count), bulk.1.first(count));
        let ids = first..first + count as KeyId;
        if grows {
            // Copied, if a fork has it.
            self.frozen = self.frozen.min(self.trees.len() - 1);
        }
        match self.trees.last_mut() {
            Some(last) if grows && count < last.len => {
                return Ok(insert(Arc::make_mut(last), bulk, first, workers));
            }
            Some(last) if grows => {
                let (mut all, mut tokens) = last.tokens_from(0);
                all.extend(ids);
                tokens.reserve(count);
                (0..count).for_each(|i| tokens.push(bulk.0, bulk.1, i));
                let tokens = (tokens.keys.strided(), tokens.values.strided());
                *last = Arc::new(build(tokens, &all, Some(last), options, stream, workers)?);
            }
            last => {
                let ids: Vec<KeyId> = ids.collect();
                let last = last.as_deref().map(Arc::as_ref);
                let tree = build(bulk, &ids, last, options, stream, workers)?;
                self.trees.push(Arc::new(tree));
            }
        }
        Ok(count)
    }

    /// Whether tokens go into the last tree, or into one that follows it.
    fn may_grow(&self) -> bool {
        let Some(last) = self.trees.last() else {
            return false;
        };
        self.frozen < self.trees.len()
            || last.len <= SMALL
            || SMALL_SHARE * last.len <= self.len()
            || self.trees.len() == MOST_TREES
    }

    /// Removes the tokens from position `first` on.
    pub fn remove_from(&mut self, first: KeyId) {
        while let Some(last) = self.trees.last_mut() {
            let mut kept = 0;
            last.for_each_token(|id, _, _| kept += usize::from(id < first));
            if kept == last.len {
                break;
            }
            if kept > 0 {
                Arc::make_mut(last).remove_from(first);
                self.frozen = self.frozen.min(self.trees.len() - 1);
                break;
            }
            self.trees.pop();
        }
        self.frozen = self.frozen.min(self.trees.len());
    }

    /// Copies of the tokens from position `first` on, by position; `None` if there are none.
    pub fn tokens_from(&self, first: KeyId) -> Option<Span> {
        let spans = self.trees.iter().map(|tree| tree.tokens_from(first).1);
        spans
            .filter(|span| !span.is_empty())
            .reduce(|mut all, next| {
                all.extend(&next);
                all
            })
    }

    /// Calls `visit(position, key, value)` for every token, in no particular order.
    pub fn for_each_token(&self, mut visit: impl FnMut(KeyId, Elements<'_>, Elements<'_>)) {
        for tree in &self.trees {
            tree.for_each_token(|id, page, row| {
                let (keys, values) = (tree.pages.keys(page), tree.pages.values(page));
                visit(id, keys.row(row), values.row(row));
            });
        }
    }

    /// Bytes of everything held, and how many of them forks hold too.
    pub fn bytes(&self) -> (usize, usize) {
        let table = self.trees.capacity() * size_of::<Arc<Tree>>();
        self.trees.iter().fold((table, 0), |(all, shared), tree| {
            let bytes = tree.bytes();
            let twice = if Arc::strong_count(tree) > 1 {
                bytes
            } else {
                0
            };
            (all + bytes, shared + twice)
        })
    }

    /// Every invariant: those of the trees, and that they hold exactly the positions from `first` on.
    pub fn check(&self, first: KeyId) -> Result<()> {
        let broken = |what: String| Err(Error::Invariant(what));
        if self.frozen > self.trees.len() || self.trees.len() > MOST_TREES {
            let (frozen, count) = (self.frozen, self.trees.len());
            return broken(format!("{count} trees, {frozen} of them frozen"));
        }
        let mut next = first;
        for tree in &self.trees {
            tree.check()?;
            let mut ids: Vec<KeyId> = Vec::with_capacity(tree.len);
            tree.for_each_token(|id, _, _| ids.push(id));
            ids.sort_unstable();
            let end = next + tree.len as KeyId;
            if !ids.into_iter().eq(next..end) {
                return broken(format!(
                    "a tree does not hold exactly positions {next} to {end}"
                ));
            }
            next = end;
        }
        Ok(())
    }
}

/// Keys and values.
type Rows<'a> = (Strided<'a>, Strided<'a>);

/// Puts tokens into a tree one by one; returns how many, fewer if cancelled.
fn insert(tree: &mut Tree, (keys, values): Rows<'_>, first: KeyId, workers: Workers<'_>) -> usize {
    let inserted = INSERTER.with_borrow_mut(|inserter| {
        inserter.fit(keys.dim, values.dim);
        (0..keys.len)
            .take_while(|_| workers.check().is_ok())
            .fold(0, |_, i| {
                inserter.insert(tree, keys.row(i), values.row(i), first + i as KeyId);
                i + 1
            })
    });
    tree.refresh_crowds();
    inserted
}

/// A tree of these tokens. Too few to say how keys are centred are centred like those of `last`.
fn build(
    (keys, values): Rows<'_>,
    ids: &[KeyId],
    last: Option<&Tree>,
    options: &TreeOptions,
    stream: u64,
    workers: Workers<'_>,
) -> Result<Tree> {
    let tokens = Tokens { keys, values, ids };
    let like = last.filter(|_| ids.len() < FIRST_BULK);
    Tree::build(tokens, like, options, stream, workers)
}
