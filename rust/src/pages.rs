//! Host pages: the keys, values and ids of a few similar tokens, contiguous and reference-counted.
//!
//! A page is a *block* of a large chunk: its K rows, then its V rows. Blocks are exactly as long as
//! their page, so a full pool has no slack; a page that grows moves to a longer block and its old
//! block is used again, by the next page of that length or merged with free neighbours. Shared pages
//! are copied before they change.

use crate::ids::{KeyId, PageId};
use crate::rows::{Buffer, Dtype, Elements, Rows, make_room};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Rows of a chunk made for growth; a bulk gets one chunk of its own size.
const GROWTH_ROWS: usize = 64;
/// Rows of the longest free block that is set aside, and blocks of one length that are.
const ASIDE_ROWS: usize = 16;
const ASIDE: usize = 8;

#[derive(Debug, Clone, Copy)]
struct Block {
    chunk: u32,
    /// First row of the block in its chunk.
    start: u32,
    rows: u32,
}

#[derive(Debug, Clone, Copy)]
struct Page {
    block: Block,
    references: u32,
}

#[derive(Debug, Clone)]
struct Chunk {
    data: Buffer,
    ids: Vec<KeyId>,
}

/// Blocks that no page uses. Those just freed are set aside for the next page of their length: pages
/// that grow by single rows pass the same few lengths on. The others are merged with their neighbours.
#[derive(Debug, Clone, Default)]
struct FreeBlocks {
    /// By their rows.
    aside: [Vec<Block>; ASIDE_ROWS + 1],
    /// Chunk and first row -> rows.
    by_place: BTreeMap<(u32, u32), u32>,
    /// Rows, chunk, first row.
    by_rows: BTreeSet<(u32, u32, u32)>,
}

impl FreeBlocks {
    fn remove(&mut self, block: Block) {
        self.by_place.remove(&(block.chunk, block.start));
        self.by_rows.remove(&(block.rows, block.chunk, block.start));
    }

    fn put(&mut self, block: Block) {
        match self.aside.get_mut(block.rows as usize) {
            Some(aside) if aside.len() < ASIDE => aside.push(block),
            _ => self.merge(block),
        }
    }

    /// A block of `rows` rows: one set aside, or the start of the shortest one that is long enough.
    fn take(&mut self, rows: u32) -> Option<Block> {
        let aside = self.aside.get_mut(rows as usize).and_then(Vec::pop);
        aside.or_else(|| self.cut(rows)).or_else(|| {
            for rows in 0..self.aside.len() {
                while let Some(block) = self.aside[rows].pop() {
                    self.merge(block);
                }
            }
            self.cut(rows)
        })
    }

    /// Adds a block, merged with its free neighbours.
    fn merge(&mut self, mut block: Block) {
        let chunk = block.chunk;
        let at = |(start, rows): (u32, u32)| Block { chunk, start, rows };
        let before = self.by_place.range(..(chunk, block.start)).next_back();
        let before =
            before.filter(|((c, start), rows)| *c == chunk && start + **rows == block.start);
        if let Some(before) = before.map(|((_, start), rows)| at((*start, *rows))) {
            self.remove(before);
            block = at((before.start, before.rows + block.rows));
        }
        let end = block.start + block.rows;
        if let Some(&rows) = self.by_place.get(&(chunk, end)) {
            self.remove(at((end, rows)));
            block.rows += rows;
        }
        self.by_place.insert((chunk, block.start), block.rows);
        self.by_rows.insert((block.rows, chunk, block.start));
    }

    /// The first `rows` rows of the shortest merged block that has as many.
    fn cut(&mut self, rows: u32) -> Option<Block> {
        let &(found, chunk, start) = self.by_rows.range((rows, 0, 0)..).next()?;
        let block = Block {
            chunk,
            start,
            rows: found,
        };
        self.remove(block);
        if found > rows {
            self.merge(Block {
                start: start + rows,
                rows: found - rows,
                ..block
            });
        }
        Some(Block { rows, ..block })
    }

    fn rows(&self) -> usize {
        let aside = self.aside.iter().flatten().map(|block| block.rows);
        aside
            .chain(self.by_place.values().copied())
            .map(|rows| rows as usize)
            .sum()
    }

    /// Bytes of both trees: their entries, and as much again at most for what nodes leave empty.
    fn bytes(&self) -> usize {
        let aside: usize = self.aside.iter().map(Vec::capacity).sum();
        aside * size_of::<Block>()
            + 2 * self.by_place.len() * (size_of::<[u32; 3]>() + size_of::<[u32; 3]>())
    }
}

/// Which rows of a page.
#[derive(Debug, Clone, Copy)]
pub enum Part {
    Keys,
    Values,
}

/// All pages of one KV head.
#[derive(Debug, Clone)]
pub struct PagePool {
    dtype: Dtype,
    key_dim: usize,
    value_dim: usize,
    chunks: Vec<Chunk>,
    pages: Vec<Page>,
    free_pages: Vec<PageId>,
    free: FreeBlocks,
    rows_held: usize,
}

impl PagePool {
    /// `value_dim` may be 0 (an index of keys alone).
    pub fn new(dtype: Dtype, key_dim: usize, value_dim: usize) -> Self {
        Self {
            dtype,
            key_dim,
            value_dim,
            chunks: Vec::new(),
            pages: Vec::new(),
            free_pages: Vec::new(),
            free: FreeBlocks::default(),
            rows_held: 0,
        }
    }

    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    pub fn key_dim(&self) -> usize {
        self.key_dim
    }

    pub fn value_dim(&self) -> usize {
        self.value_dim
    }

    /// Makes room for `rows` more rows in one chunk of exactly that size.
    pub fn reserve(&mut self, rows: usize, pages: usize) {
        self.add_chunk(rows);
        self.pages.reserve_exact(pages);
    }

    /// A page of `rows` rows (at least 1) held once; its contents are to be written.
    pub fn allocate(&mut self, rows: usize) -> PageId {
        let page = Page {
            block: self.take_block(rows),
            references: 1,
        };
        self.rows_held += rows;
        if let Some(id) = self.free_pages.pop() {
            self.pages[id.index()] = page;
            return id;
        }
        make_room(&mut self.pages, 1);
        self.pages.push(page);
        PageId(self.pages.len() as u32 - 1)
    }

    /// Holds a page once more.
    pub fn retain(&mut self, id: PageId) {
        self.pages[id.index()].references += 1;
    }

    /// Lets a page go; the last holder frees it.
    pub fn release(&mut self, id: PageId) {
        let page = &mut self.pages[id.index()];
        page.references -= 1;
        if page.references == 0 {
            let block = page.block;
            self.rows_held -= block.rows as usize;
            self.free.put(block);
            self.free_pages.push(id);
        }
    }

    pub fn write(
        &mut self,
        id: PageId,
        i: usize,
        key: Elements<'_>,
        value: Elements<'_>,
        key_id: KeyId,
    ) {
        let (block, dims) = (self.pages[id.index()].block, (self.key_dim, self.value_dim));
        assert!(i < block.rows as usize, "a row beyond its page");
        let chunk = &mut self.chunks[block.chunk as usize];
        let (keys, values) = offsets(block, dims);
        chunk.data.write(keys + i * dims.0, key);
        chunk.data.write(values + i * dims.1, value);
        chunk.ids[block.start as usize + i] = key_id;
    }

    /// [rows, key_dim]
    pub fn keys(&self, id: PageId) -> Rows<'_> {
        let block = self.pages[id.index()].block;
        let at = offsets(block, (self.key_dim, self.value_dim)).0;
        self.block_rows(block, at, self.key_dim)
    }

    /// [rows, value_dim]
    pub fn values(&self, id: PageId) -> Rows<'_> {
        let block = self.pages[id.index()].block;
        let at = offsets(block, (self.key_dim, self.value_dim)).1;
        self.block_rows(block, at, self.value_dim)
    }

    /// Visits the K rows, or the V rows, of these tokens, each a page and a row in it, in runs that
    /// lie in one chunk: `visit(rows, index, first)` gets all rows of a chunk, which of them are
    /// meant, and how many tokens came before. Only where a key is as long as a value.
    pub fn for_each_run(
        &self,
        part: Part,
        tokens: impl Iterator<Item = (PageId, Range<usize>)>,
        index: &mut Vec<u32>,
        mut visit: impl FnMut(Rows<'_>, &[u32], usize),
    ) {
        assert_eq!(self.key_dim, self.value_dim);
        let (mut run, mut first) = (0, 0);
        index.clear();
        for (page, rows) in tokens {
            let block = self.pages[page.index()].block;
            if block.chunk != run && !index.is_empty() {
                visit(self.chunk_rows(run), index, first);
                first += index.len();
                index.clear();
            }
            run = block.chunk;
            let start = 2 * block.start
                + match part {
                    Part::Keys => 0,
                    Part::Values => block.rows,
                };
            assert!(rows.end <= block.rows as usize, "a row beyond its page");
            index.extend(start + rows.start as u32..start + rows.end as u32);
        }
        if !index.is_empty() {
            visit(self.chunk_rows(run), index, first);
        }
    }

    /// All rows of a chunk, K and V as they lie.
    fn chunk_rows(&self, chunk: u32) -> Rows<'_> {
        let chunk = &self.chunks[chunk as usize];
        Rows {
            dim: self.key_dim,
            len: 2 * chunk.ids.len(),
            elements: chunk.data.as_elements(),
        }
    }

    pub fn ids(&self, id: PageId) -> &[KeyId] {
        let block = self.pages[id.index()].block;
        &self.chunks[block.chunk as usize].ids[block.start as usize..][..block.rows as usize]
    }

    pub fn len(&self, id: PageId) -> usize {
        self.pages[id.index()].block.rows as usize
    }

    pub fn references(&self, id: PageId) -> u32 {
        self.pages[id.index()].references
    }

    /// The page with one row more, at its end. Releases `id`.
    pub fn push(
        &mut self,
        id: PageId,
        key: Elements<'_>,
        value: Elements<'_>,
        key_id: KeyId,
    ) -> PageId {
        let old = self.len(id);
        let grown = self.allocate(old + 1);
        self.copy_rows((id, 0), (grown, 0), old);
        self.write(grown, old, key, value, key_id);
        self.release(id);
        grown
    }

    /// A new page of the rows `keep` of `id`, which stays as it is.
    pub fn subset(&mut self, id: PageId, keep: &[u32]) -> PageId {
        let page = self.allocate(keep.len());
        for (to, &from) in keep.iter().enumerate() {
            self.copy_rows((id, from as usize), (page, to), 1);
        }
        page
    }

    /// Moves all pages into one chunk of their size, if more than an eighth of the rows is free.
    pub fn compact(&mut self) {
        let all: usize = self.chunks.iter().map(|c| c.ids.len()).sum();
        if 8 * self.free.rows() <= all {
            return;
        }
        let (old, width) = (
            std::mem::take(&mut self.chunks),
            self.key_dim + self.value_dim,
        );
        self.free = FreeBlocks::default();
        self.add_chunk(self.rows_held);
        for id in 0..self.pages.len() {
            if self.pages[id].references == 0 {
                continue;
            }
            let from = self.pages[id].block;
            let to = self.take_block(from.rows as usize);
            self.pages[id].block = to;
            let chunk = &old[from.chunk as usize];
            let (start, rows) = (from.start as usize, from.rows as usize);
            let source = chunk.data.as_elements();
            let source = source.slice(start * width..(start + rows) * width);
            let target = &mut self.chunks[to.chunk as usize];
            target.data.write(to.start as usize * width, source);
            target.ids[to.start as usize..][..rows].copy_from_slice(&chunk.ids[start..][..rows]);
        }
    }

    /// Rows in pages.
    pub fn rows_held(&self) -> usize {
        self.rows_held
    }

    /// Bytes of everything, slack and tables included.
    pub fn bytes(&self) -> usize {
        let chunks: usize = self
            .chunks
            .iter()
            .map(|c| c.data.bytes() + c.ids.capacity() * size_of::<KeyId>())
            .sum();
        size_of::<Self>()
            + chunks
            + self.free.bytes()
            + self.chunks.capacity() * size_of::<Chunk>()
            + self.pages.capacity() * size_of::<Page>()
            + self.free_pages.capacity() * size_of::<PageId>()
    }

    /// Counts rows anew: pages and free blocks make up every chunk.
    pub fn check(&self) -> Result<(), String> {
        let held: usize = self
            .pages
            .iter()
            .filter(|p| p.references > 0)
            .map(|p| p.block.rows as usize)
            .sum();
        let free = self.free.rows();
        let all: usize = self.chunks.iter().map(|c| c.ids.len()).sum();
        if held != self.rows_held || held + free != all {
            return Err(format!(
                "pages hold {held} rows (counted {}), {free} are free, {all} exist",
                self.rows_held
            ));
        }
        Ok(())
    }

    fn block_rows(&self, block: Block, at: usize, dim: usize) -> Rows<'_> {
        let rows = block.rows as usize;
        let all = self.chunks[block.chunk as usize].data.as_elements();
        Rows {
            dim,
            len: rows,
            elements: all.slice(at..at + rows * dim),
        }
    }

    /// Copies `count` rows from one page and row on to another.
    fn copy_rows(&mut self, from: (PageId, usize), to: (PageId, usize), count: usize) {
        let dims = (self.key_dim, self.value_dim);
        let (source, target) = (
            self.pages[from.0.index()].block,
            self.pages[to.0.index()].block,
        );
        let (from_keys, from_values) = offsets(source, dims);
        let (to_keys, to_values) = offsets(target, dims);
        let copies = [
            (from_keys, to_keys, dims.0),
            (from_values, to_values, dims.1),
        ]
        .map(|(at, start, dim)| {
            let at = at + from.1 * dim;
            (at..at + count * dim, start + to.1 * dim)
        });
        let (a, b) = (source.chunk as usize, target.chunk as usize);
        let ids = source.start as usize + from.1;
        let (ids, to_ids) = (ids..ids + count, target.start as usize + to.1);
        if a == b {
            let chunk = &mut self.chunks[a];
            (copies.into_iter()).for_each(|(range, to)| chunk.data.copy_within(range, to));
            chunk.ids.copy_within(ids, to_ids);
        } else {
            let [source, target] = self
                .chunks
                .get_disjoint_mut([a, b])
                .expect("two different chunks");
            let rows = source.data.as_elements();
            (copies.into_iter()).for_each(|(range, to)| target.data.write(to, rows.slice(range)));
            target.ids[to_ids..][..count].copy_from_slice(&source.ids[ids]);
        }
    }

    fn take_block(&mut self, rows: usize) -> Block {
        if let Some(block) = self.free.take(rows as u32) {
            return block;
        }
        let total: usize = self.chunks.iter().map(|c| c.ids.len()).sum();
        self.add_chunk(rows.max(GROWTH_ROWS).max(total / 64));
        let block = self.free.take(rows as u32);
        block.expect("the new chunk is long enough")
    }

    fn add_chunk(&mut self, rows: usize) {
        self.free.merge(Block {
            chunk: self.chunks.len() as u32,
            start: 0,
            rows: rows as u32,
        });
        self.chunks.push(Chunk {
            data: Buffer::zeros(self.dtype, rows * (self.key_dim + self.value_dim)),
            ids: vec![0; rows],
        });
    }
}

/// First element of a block's K rows and of its V rows.
fn offsets(block: Block, (key_dim, value_dim): (usize, usize)) -> (usize, usize) {
    let start = block.start as usize * (key_dim + value_dim);
    (start, start + block.rows as usize * key_dim)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;
    use proptest::prelude::*;

    type Row = (f32, f32, u32);

    fn contents(pool: &PagePool, id: PageId) -> Vec<Row> {
        let (Elements::F32(k), Elements::F32(v)) =
            (pool.keys(id).elements, pool.values(id).elements)
        else {
            unreachable!()
        };
        let ids = pool.ids(id).iter();
        ids.enumerate()
            .map(|(i, &id)| (k[i * 2], v[i], id))
            .collect()
    }

    proptest! {
        /// Pages against a plain model while they grow, split, are shared and go.
        #[test]
        fn behaves_like_a_list_of_lists(seed in any::<u64>(), steps in 1usize..200) {
            let mut random = Random::new(seed, 0);
            let mut pool = PagePool::new(Dtype::F32, 2, 1);
            let mut model: Vec<(PageId, Vec<Row>)> = Vec::new();
            for step in 0..steps as u32 {
                let row = (step as f32, -(step as f32), step);
                let key = [row.0, row.0];
                let value = [row.1];
                match random.below(6) {
                    5 => pool.compact(),
                    0 | 1 if !model.is_empty() => {
                        let at = random.below(model.len());
                        let (id, rows) = &mut model[at];
                        *id = pool.push(*id, Elements::F32(&key), Elements::F32(&value), row.2);
                        rows.push(row);
                    }
                    2 if !model.is_empty() => {
                        let at = random.below(model.len());
                        let count = 1 + random.below(model[at].1.len());
                        let keep = random.sample(model[at].1.len(), count);
                        let id = pool.subset(model[at].0, &keep);
                        let rows = keep.iter().map(|&i| model[at].1[i as usize]).collect();
                        model.push((id, rows));
                    }
                    3 if !model.is_empty() => {
                        let (id, _) = model.swap_remove(random.below(model.len()));
                        pool.release(id);
                    }
                    4 if !model.is_empty() => {
                        // A shared page must not see what its other holder pushes.
                        let at = random.below(model.len());
                        let (id, rows) = model[at].clone();
                        pool.retain(id);
                        let grown = pool.push(id, Elements::F32(&key), Elements::F32(&value), row.2);
                        model.push((grown, [rows, vec![row]].concat()));
                    }
                    _ => {
                        let id = pool.allocate(1);
                        pool.write(id, 0, Elements::F32(&key), Elements::F32(&value), row.2);
                        model.push((id, vec![row]));
                    }
                }
                prop_assert_eq!(pool.check(), Ok(()));
                pool.disjoint();
            }
            for (id, rows) in &model {
                prop_assert_eq!(&contents(&pool, *id), rows);
            }
        }
    }

    impl PagePool {
        /// Every row of every chunk is in exactly one page or free block.
        fn disjoint(&self) {
            let mut seen: Vec<Vec<bool>> = self
                .chunks
                .iter()
                .map(|c| vec![false; c.ids.len()])
                .collect();
            let held = self
                .pages
                .iter()
                .filter(|p| p.references > 0)
                .map(|p| p.block);
            let merged = self.free.by_place.iter();
            let merged = merged.map(|(&(chunk, start), &rows)| Block { chunk, start, rows });
            let aside = self.free.aside.iter().flatten().copied();
            for block in held.chain(merged).chain(aside) {
                for seen in
                    &mut seen[block.chunk as usize][block.start as usize..][..block.rows as usize]
                {
                    assert!(!std::mem::replace(seen, true));
                }
            }
            assert!(seen.iter().flatten().all(|&seen| seen));
        }
    }

    /// Pages that grow row by row and go again use the room of those before them.
    #[test]
    fn growing_again_and_again_does_not_hoard_rows() {
        let mut random = Random::new(1, 0);
        let mut pool = PagePool::new(Dtype::F32, 2, 1);
        let row = |x: &'static [f32]| Elements::F32(x);
        let mut pages: Vec<PageId> = Vec::new();
        for step in 0..40_000 {
            if pages.len() < 200 {
                let id = pool.allocate(1);
                pool.write(id, 0, row(&[1.0, 2.0]), row(&[3.0]), step);
                pages.push(id);
            }
            let at = random.below(pages.len());
            let id = pool.push(pages[at], row(&[1.0, 2.0]), row(&[3.0]), step);
            pages[at] = id;
            if pool.len(id) > 12 {
                let half: Vec<u32> = (0..6).collect();
                pages[at] = pool.subset(id, &half);
                pool.release(id);
            }
        }
        pool.disjoint();
        let all: usize = pool.chunks.iter().map(|c| c.ids.len()).sum();
        assert!(
            5 * all <= 7 * pool.rows_held(),
            "{all} for {}",
            pool.rows_held()
        );
    }

    #[test]
    fn a_bulk_has_no_slack() {
        let mut pool = PagePool::new(Dtype::F16, 8, 8);
        pool.reserve(100, 10);
        (0..10).for_each(|_| {
            pool.allocate(10);
        });
        assert_eq!(pool.chunks.len(), 1);
        assert_eq!(pool.chunks[0].data.bytes(), 100 * 16 * 2);
    }
}
